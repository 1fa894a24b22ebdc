"""Runs one mini-batch of verl: logprobs on trees, verl's own loss function, gradients on trees.

verl's losses are functions of the logprobs and entropies of whole rows. They return one number that is additive over
groups of rows, because its denominators are those of the whole mini-batch. The engine therefore calls the unchanged
loss function on the rows whose last tokens a segment computed, and sends the gradient back through the tree. A loss
that compares rows gets all of them at once instead: a pass without gradients computes the logprobs, the loss function
gives their gradient, and the training pass runs with that gradient as constants.

Reported loss and metrics come from one call on the rows that the rank brought, with the logprobs of the training pass.

Legend: N tokens of a group's rows, B rows, T largest number of trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl.utils.py_functional import append_to_dict

from megatron_dta.core.engine import TokenOutputs, TreeEngine
from megatron_dta.core.objectives.fields import SequenceLoss
from megatron_dta.integrations.plans import Planner, RowPlan
from megatron_dta.integrations.rows import Placement, Row, shifted
from megatron_dta.integrations.verl.rows import RowTable, gather_tables, read_rows

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]
# Policy losses of verl 0.9 whose value for a row depends on the other rows of the call.
_COMPARING = ("clip_cov", "kl_cov", "geo_mean", "bypass_mode")


class MiniBatch:
    """One mini-batch of this rank, which all data-parallel ranks run together.

    Args:
        names: names of verl's model outputs that hold the logprobs and the entropies; None for the latter if the loss
            function must not see entropies.
    """

    def __init__(self, data: TensorDict, engine: TreeEngine, planner: Planner, names: tuple[str, str | None]) -> None:
        self._engine, self._names = engine, names
        self.plan: RowPlan = planner.plan(read_rows(data))
        self._own = RowTable(data)
        self._dp_size = engine.mesh.data_size

    @property
    def _rows(self) -> list[Row]:
        """The rows that this rank brought."""
        return self.plan.rows[self.plan.begin : self.plan.begin + self.plan.count]

    def _own_data(self) -> TensorDict:
        return self._own.select(range(self.plan.count), self._engine.device)

    def infer(self, loss: Loss | None, group: ProcessGroup | None) -> dict[str, Any]:
        """Outputs under the current weights, and the loss if ``loss`` is given."""
        return self._report(self._engine.compute_outputs(self.plan.batch), loss, group)

    def train(self, loss: Loss, group: ProcessGroup | None, scope: str) -> tuple[dict[str, Any], dict[str, float]]:
        """Add the gradient of the loss to the parameters' gradients.

        Args:
            scope: "sequences" or "mini_batch", see ``MegatronDtaEngineConfig.loss_scope``.

        Returns:
            outputs, loss and metrics in verl's form, and statistics of the trees.
        """
        if scope == "mini_batch":
            function = self._constant_gradient(loss, group)
        else:
            table = gather_tables(self._own, self._engine.mesh)
            function = self._group_loss(loss, table)
        result = self._engine.forward_backward(self.plan.batch, SequenceLoss(function), return_outputs=True)
        report = self._report(result.outputs, loss, group)
        tree, dense = self._engine.operations(self.plan.batch.plan)
        statistics = {
            "tree/token_reuse": result.sequence_tokens / max(1, result.computed_tokens),
            "tree/computed_tokens": float(result.computed_tokens),
            "tree/sequence_tokens": float(result.sequence_tokens),
            "tree/segments": float(result.segments),
            "tree/peak_in_flight_tokens": float(result.peak_in_flight_tokens),
            "tree/flop_speedup": dense / tree if tree else 1.0,
        }
        return report, statistics

    def _group_loss(self, loss: Loss, table: RowTable) -> Callable[[Tensor, Tensor, np.ndarray], Tensor]:
        """The engine's loss function for groups of finished sequences."""

        def function(logprobs_BT: Tensor, entropy_BT: Tensor, sequences: np.ndarray) -> Tensor:
            numbers = [self.plan.computed[sequence] for sequence in sequences]
            layout = Placement([self.plan.rows[number] for number in numbers], logprobs_BT)
            outputs = {
                name: torch.nested.nested_tensor_from_jagged(layout.join(values), layout.offsets)
                for name, values in self._named(logprobs_BT, entropy_BT)
            }
            value, _ = loss(model_output=outputs, data=table.select(numbers, self._engine.device), dp_group=None)
            # verl's losses are multiplied by the number of replicas because its engines average their gradients.
            return value / self._dp_size

        return function

    def _constant_gradient(
        self, loss: Loss, group: ProcessGroup | None
    ) -> Callable[[Tensor, Tensor, np.ndarray], Tensor]:
        """The gradient of a loss over all rows of this rank, as a linear loss of the sequences."""
        outputs = self._model_outputs(self._engine.compute_outputs(self.plan.batch))
        leaves = {name: values.values().requires_grad_() for name, values in outputs.items()}
        nested = {
            name: torch.nested.nested_tensor_from_jagged(leaf, outputs[name].offsets()) for name, leaf in leaves.items()
        }
        with torch.enable_grad():
            value, _ = loss(model_output=nested, data=self._own_data(), dp_group=group)
            grads = torch.autograd.grad(value / self._dp_size, list(leaves.values()), allow_unused=True)
        gradients = [
            torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves.values(), grads, strict=True)
        ]
        lengths = [len(row.token_ids) for row in self._rows]
        flat = torch.stack(gradients).cpu().numpy()
        # Position t of an output belongs to token t + 1. The first token of a row, which gets another row's value, is
        # never trained.
        by_row = np.split(np.roll(flat, 1, axis=1), np.cumsum(lengths)[:-1], axis=1)
        coefficients: dict[int, np.ndarray] = {}
        rank_rows = {self.plan.begin + i: values for i, values in enumerate(by_row)}
        for part in self._engine.mesh.gather_over_data(rank_rows):
            coefficients |= part

        def function(logprobs_BT: Tensor, entropy_BT: Tensor, sequences: np.ndarray) -> Tensor:
            total = logprobs_BT.new_zeros(())
            for b, sequence in enumerate(sequences):
                number = self.plan.computed[sequence]
                of_row = coefficients[number][:, self.plan.rows[number].loss_mask]
                factors = torch.from_numpy(np.ascontiguousarray(of_row)).to(logprobs_BT)
                for (_, values), factor in zip(self._named(logprobs_BT, entropy_BT), factors, strict=True):
                    total = total + (values[b, : len(factor)] * factor).sum()
            return total

        return function

    def _named(self, logprobs: Any, entropy: Any) -> list[tuple[str, Any]]:
        """The outputs that verl asked for, with its names."""
        return [(name, values) for name, values in zip(self._names, (logprobs, entropy), strict=True) if name]

    def _model_outputs(self, outputs: TokenOutputs) -> dict[str, Tensor]:
        """verl's model outputs for the rows of this rank: jagged, position t holds the output for token t + 1."""
        return {
            name: _shifted(self.plan.to_owners(values, self._engine), self._engine.device)
            for name, values in self._named(outputs.logprobs, outputs.entropy)
        }

    def _report(self, outputs: TokenOutputs, loss: Loss | None, group: ProcessGroup | None) -> dict[str, Any]:
        model_output = self._model_outputs(outputs)
        report: dict[str, Any] = {"model_output": model_output, "loss": [], "metrics": {}}
        if loss is None:
            return report
        with torch.no_grad():
            value, metrics = loss(model_output=dict(model_output), data=self._own_data(), dp_group=group)
        report["loss"].append(float(value))
        append_to_dict(report["metrics"], metrics)
        return report


def _shifted(values: Sequence[np.ndarray], device: torch.device) -> Tensor:
    rows = [torch.from_numpy(shifted(row)) for row in values]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).to(device)


def describe(statistics: dict[str, float]) -> str:
    """What the trees of a mini-batch saved, in a sentence."""
    return (
        f"{statistics['tree/sequence_tokens']:,.0f} tokens of the first mini-batch in "
        f"{statistics['tree/computed_tokens']:,.0f} computed tokens ({statistics['tree/token_reuse']:.2f}x reuse), "
        f"{statistics['tree/flop_speedup']:.2f}x fewer operations"
    )


def loss_scope(chosen: str, loss: Loss) -> str:
    """The scope of ``loss``: ``chosen``, or for "auto" the one that verl's loss function needs."""
    if chosen != "auto":
        return chosen
    config = getattr(loss, "keywords", {}).get("config")
    mode = getattr(getattr(config, "policy_loss", None), "loss_mode", None)
    # Without a constant, this aggregation divides by the longest response of the call.
    by_width = getattr(config, "loss_agg_mode", None) == "seq-mean-token-sum-norm" and not config.loss_scale_factor
    return "mini_batch" if mode in _COMPARING or by_width else "sequences"
