"""Runs one batch of AReaL on trees: reads padded rows, calls AReaL's loss function, returns logprobs in its form.

AReaL's loss functions take the logprobs and entropies of packed rows and a packed batch, and return a mean. The mean of
a micro-batch counts with ``loss_weight_fn(micro-batch)`` divided by the sum of these weights over all micro-batches and
data-parallel ranks. Here a group of rows whose last tokens a segment computed takes the place of a micro-batch.

AReaL marks trained tokens in ``loss_mask`` either at the tokens (in rollouts) or at the positions before them (in
``train_batch``, after ``compute_advantages``). Both are computed. Everywhere else logprobs and entropies are 0.

Legend: N tokens of a group's rows, B rows, T largest number of trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import StepResult, TreeEngine
from megatron_dta.core.objectives.fields import SequenceLoss
from megatron_dta.integrations.plans import Planner, RowPlan
from megatron_dta.integrations.rows import Placement, Row, shifted

Loss = Callable[..., Tensor]
LossWeight = Callable[[dict[str, Any]], Tensor]


class PaddedRows:
    """The rows of padded batches on the host; fields that do not belong to rows are kept once."""

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self.fields: list[dict[str, Tensor]] = []
        self.common: dict[str, Any] = {}
        for batch in batches:
            self._add(batch)

    def _add(self, batch: dict[str, Any]) -> None:
        if "multi_modal_input" in batch:
            raise InputError("multi_modal_input: images are not supported by the engine megatron_dta")
        attention_mask = batch["attention_mask"].cpu()
        shape, lengths = attention_mask.shape, attention_mask.sum(1).tolist()
        rows: list[dict[str, Tensor]] = [{} for _ in lengths]
        for name, value in batch.items():
            if name == "attention_mask":
                continue
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != shape[0]:
                self.common[name] = value
                continue
            is_padded = value.shape[:2] == shape
            for index, (fields, row) in enumerate(zip(rows, value.cpu(), strict=True)):
                fields[name] = row[: lengths[index]] if is_padded else row[None]
        self.fields += rows

    def rows(self) -> list[Row]:
        """Tokens, and the tokens whose logprobs a loss may use."""
        rows = []
        for fields in self.fields:
            token_ids = fields["input_ids"].numpy().astype(np.int64)
            mask = fields["loss_mask"].numpy().astype(bool) if "loss_mask" in fields else np.ones(len(token_ids), bool)
            mask = mask | np.append(False, mask[:-1])
            mask[:1] = False
            rows.append(Row(token_ids, mask))
        return rows

    def pack(self, numbers: Sequence[int], device: torch.device) -> dict[str, Any]:
        """The given rows in AReaL's packed form: joined fields, ``cu_seqlens`` and ``max_seqlen``."""
        chosen = [self.fields[number] for number in numbers]
        lengths = [len(fields["input_ids"]) for fields in chosen]
        packed = {name: torch.cat([fields[name] for fields in chosen]).to(device) for name in chosen[0]}
        packed["cu_seqlens"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        return self.common | packed | {"max_seqlen": max(lengths)}


class RowBatch:
    """The batch of this rank, which all data-parallel ranks run together.

    Args:
        input_: AReaL's batch: padded on the right, or a list of such batches.
    """

    def __init__(self, input_: dict[str, Any] | list[dict[str, Any]], engine: TreeEngine, planner: Planner) -> None:
        self._engine, self._input = engine, input_
        self._own = PaddedRows(input_ if isinstance(input_, list) else [input_])
        self.plan: RowPlan = planner.plan(self._own.rows())

    def train(self, loss_fn: Loss, loss_weight_fn: LossWeight) -> StepResult:
        """Add the gradient of AReaL's loss of all ranks to the parameters' gradients."""
        total = self._total_weight(loss_weight_fn)
        table = PaddedRows([])
        table.common = self._own.common
        table.fields = [fields for part in self._engine.mesh.gather_over_data(self._own.fields) for fields in part]

        def function(logprobs_BT: Tensor, entropy_BT: Tensor, sequences: np.ndarray) -> Tensor:
            numbers = [self.plan.computed[sequence] for sequence in sequences]
            layout = Placement([self.plan.rows[number] for number in numbers], logprobs_BT)
            data = table.pack(numbers, logprobs_BT.device)
            return self._weighted(
                layout.join(logprobs_BT), layout.join(entropy_BT), data, loss_fn, loss_weight_fn, total
            )

        return self._engine.forward_backward(self.plan.batch, SequenceLoss(function))

    @torch.no_grad()
    def evaluate(self, loss_fn: Loss, loss_weight_fn: LossWeight) -> Tensor:
        """AReaL's loss of all ranks under the current weights."""
        total = self._total_weight(loss_weight_fn)
        outputs = self._engine.compute_outputs(self.plan.batch)
        joined = (torch.cat(self._owned(values)) for values in (outputs.logprobs, outputs.entropy))
        loss = self._weighted(*joined, self._packed(), loss_fn, loss_weight_fn, total)
        return loss.new_tensor(sum(self._engine.mesh.gather_over_data(float(loss))))

    def logprobs(self) -> Tensor | list[Tensor]:
        """Logprobs in the form of the input: padded with 0; position t holds that of token t + 1."""
        rows = iter(self._owned(self._engine.compute_outputs(self.plan.batch).logprobs))
        padded = []
        for batch in self._input if isinstance(self._input, list) else [self._input]:
            count, width = batch["attention_mask"].shape
            rows_BT = [next(rows) for _ in range(count)]
            rows_BT = [torch.nn.functional.pad(row, (0, width - len(row))) for row in rows_BT]
            padded.append(torch.stack(rows_BT))
        return padded if isinstance(self._input, list) else padded[0]

    def _packed(self) -> dict[str, Any]:
        return self._own.pack(range(self.plan.count), self._engine.device)

    def _owned(self, values: Sequence[np.ndarray]) -> list[Tensor]:
        """Outputs of this rank's rows."""
        rows = self.plan.to_owners(values, self._engine)
        return [torch.from_numpy(shifted(row)).to(self._engine.device) for row in rows]

    def _total_weight(self, loss_weight_fn: LossWeight) -> float:
        total = sum(self._engine.mesh.gather_over_data(float(loss_weight_fn(self._packed()))))
        if total <= 0:
            raise InputError("loss_weight_fn: the weights of all rows are 0; nothing can be trained")
        return total

    @staticmethod
    def _weighted(
        logprobs_N: Tensor, entropy_N: Tensor, data: dict[str, Any], loss_fn: Loss, weight_fn: LossWeight, total: float
    ) -> Tensor:
        weight = float(weight_fn(data))
        # As in AReaL's engines, the loss function does not see groups that do not count.
        return loss_fn(logprobs_N, entropy_N, data) * (weight / total) if weight else logprobs_N.new_zeros(())
