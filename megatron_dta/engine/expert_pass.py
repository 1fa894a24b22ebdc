"""What one pass of the engine over a batch has to do because the model has experts.

Every segment's forward gets a ``TokenRouting``: how often its tokens count in the loads and in the auxiliary losses,
and which experts were chosen when they were sampled. Passes for logprobs count nothing.

Definitions, all of them those of training each sequence alone: the balancing loss is in ``balance_loss``; the z-loss of
a sequence is the mean over its tokens of the squared log-sum-exp of the router's logits, and the step's is the mean
over its sequences; an expert's load is the number of (sequence, token) pairs routed to it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_dta.engine.balance_loss import BalanceLoss
from megatron_dta.engine.batch import TreeBatch
from megatron_dta.engine.device_plan import DevicePlan
from megatron_dta.model import Mesh, TokenRouting, TreeGPTModel, accumulation_dtype
from megatron_dta.planning.multiplicity import token_weights

if TYPE_CHECKING:
    from megatron_dta.engine.executor import StepResult


class ExpertPass:
    """Routing of one walk over the ops, in one part of the model; made for models with experts only.

    Args:
        losses: sums of the auxiliary losses, for all parts that a rank has.
    """

    def __init__(
        self,
        model: TreeGPTModel,
        batch: TreeBatch,
        plan: DevicePlan,
        training: bool,
        losses: dict[str, torch.Tensor],
    ) -> None:
        self.config, self.plan, self.training, self.losses = model.config, plan, training, losses
        self.multiplicity_N = self.z_weights_N = self.balance = None
        if not training:
            return
        device, dtype = plan.stream.device, accumulation_dtype(model.config.params_dtype)
        tree, count = batch.plan.segments.tree, batch.num_sequences
        if self.config.moe_router_enable_expert_bias:
            ones = np.ones(tree.num_sequences)
            self.multiplicity_N = torch.from_numpy(token_weights(tree, ones)).to(device, torch.float32)
        if self.config.moe_z_loss_coeff:
            per_sequence = self.config.moe_z_loss_coeff / count / np.asarray(tree.sequence_lengths, dtype=np.float64)
            self.z_weights_N = torch.from_numpy(token_weights(tree, per_sequence)).to(device, dtype)
        layer_numbers = [layer.layer_number for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        # A pipeline stage may have no layer with experts.
        if self.config.moe_aux_loss_coeff and layer_numbers:
            experts, topk = self.config.num_moe_experts, self.config.moe_router_topk
            self.balance = BalanceLoss(
                batch.plan,
                plan,
                layer_numbers,
                experts,
                topk,
                self.config.moe_aux_loss_coeff * experts / (topk * max(1, count)),
                dtype,
                parallel_state.get_tensor_model_parallel_group() if self.config.sequence_parallel else None,
            )

    def routing(self, segment: int) -> TokenRouting | None:
        """Routing of a segment's pass, first forward and recomputation alike."""
        if not self.training:
            return None
        own = slice(self.plan.start[segment], self.plan.start[segment + 1])
        return TokenRouting(
            multiplicity=None if self.multiplicity_N is None else self.multiplicity_N[own],
            z_weights=None if self.z_weights_N is None else self.z_weights_N[own],
            balance=None if self.balance is None else partial(self.balance.gradient, segment),
            losses=self.losses,
        )

    def after_forward(self, segment: int, routing: TokenRouting | None) -> None:
        """Call when a segment's first forward has run."""
        if self.balance is not None and routing is not None:
            self.balance.store(segment, routing)

    def complete(self, result: StepResult, mesh: Mesh) -> StepResult:
        """``result`` with the step's auxiliary losses among its metrics, on every rank.

        They come without their coefficients, as means over the layers with experts, as Megatron reports them.
        """
        coefficients = {
            "seq_load_balancing_loss": self.config.moe_aux_loss_coeff,
            "z_loss": self.config.moe_z_loss_coeff,
        }
        used = {name: coefficient for name, coefficient in coefficients.items() if coefficient}
        if not used:
            return result
        layers = sum(self.config.moe_layer_freq)
        of_ranks = mesh.gather_from_all({name: float(self.losses.get(name, 0)) for name in used})
        losses = {
            name: result.loss.new_tensor(sum(of_rank[name] for of_rank in of_ranks) / (coefficient * layers))
            for name, coefficient in used.items()
        }
        return replace(result, metrics=result.metrics | losses)
