"""Supplies and collects the expert routing of one pass of the engine over a batch.

The forward of every segment gets a ``TokenRouting``: how often its tokens count in the loads and in the auxiliary
losses, and which experts were chosen when the tokens were sampled. Passes for logprobs only count nothing.

All quantities equal those of training each sequence alone. ``balance_loss`` defines the balancing loss. The z-loss of a
sequence is the mean over its tokens of the squared log-sum-exp of the router's logits, and the z-loss of the step is
the mean over its sequences. The load of an expert is the number of (sequence, token) pairs routed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megatron_dta.core.engine.balance_loss import BalanceLoss
from megatron_dta.core.engine.batch import TreeBatch
from megatron_dta.core.engine.device_plan import DevicePlan
from megatron_dta.core.engine.step_result import StepResult
from megatron_dta.core.model.attention.token_routing import TokenRouting
from megatron_dta.core.model.kernel_types import accumulation_dtype
from megatron_dta.core.model.parallel.context_group import context_group
from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.tree import PrefixTree


class ExpertPass:
    """Routing of one model chunk in one pass over the ops; does nothing for a model chunk without experts.

    Args:
        replays: route by the batch's ``routed_experts``.
    """

    def __init__(
        self, part: TreeGPTModel, batch: TreeBatch, plan: DevicePlan, training: bool, replays: bool = False
    ) -> None:
        self.config, self.plan = part.config, plan
        group = context_group()
        self.context_rank = 0 if group is None else group.rank
        layers = [layer.layer_number for layer in part.decoder.layers if hasattr(layer.mlp, "router")]
        self.counts = training and bool(layers)
        self.losses: dict[str, torch.Tensor] = {}
        self.multiplicity_N = self.z_weights_N = self.balance = None
        self.replay_NLK = None
        if replays and batch.routed_experts is not None:
            self.replay_NLK = torch.from_numpy(batch.routed_experts).to(plan.stream.device)
        if not self.counts:
            return
        device, dtype = plan.stream.device, accumulation_dtype(self.config.params_dtype)
        tree, num_sequences = batch.plan.segments.tree, max(1, batch.num_sequences)
        if self.config.moe_router_enable_expert_bias:
            weight_of_sequences = np.ones(tree.num_sequences)
            self.multiplicity_N = torch.from_numpy(token_weights(tree, weight_of_sequences)).to(device, torch.float32)
        if self.config.moe_z_loss_coeff:
            lengths = np.asarray(tree.sequence_lengths, dtype=np.float64)
            weights = token_weights(tree, self.config.moe_z_loss_coeff / num_sequences / lengths)
            self.z_weights_N = torch.from_numpy(weights).to(device, dtype)
        if self.config.moe_aux_loss_coeff:
            self.balance = BalanceLoss(batch.plan, plan, layers, self.config, num_sequences)

    def routing(self, segment: int) -> TokenRouting | None:
        """Routing of a segment; the first forward and a recomputation share it."""
        if not self.counts and self.replay_NLK is None:
            return None
        tokens = slice(self.plan.start[segment], self.plan.start[segment + 1])
        return TokenRouting(
            multiplicity=None if self.multiplicity_N is None else self.multiplicity_N[tokens],
            z_weights=None if self.z_weights_N is None else self.z_weights_N[tokens],
            balance=None if self.balance is None else partial(self.balance.gradient, segment),
            replay=None if self.replay_NLK is None else self.replay_NLK[tokens],
            context_rank=self.context_rank,
            losses=self.losses,
        )

    def after_forward(self, segment: int, routing: TokenRouting | None) -> None:
        """Must be called after the first forward of a segment."""
        if self.balance is not None and routing is not None:
            self.balance.store(segment, routing)


def with_auxiliary_losses(result: StepResult, passes: Sequence[ExpertPass], mesh: Mesh) -> StepResult:
    """``result`` with the step's auxiliary losses among its metrics, on every rank.

    The losses are means over the layers with experts, without their coefficients, as Megatron reports them.
    """
    config = passes[0].config
    coefficients = {"seq_load_balancing_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
    used = {name: coefficient for name, coefficient in coefficients.items() if coefficient}
    if not used:
        return result
    rank_losses = {name: sum(float(of_part.losses.get(name, 0)) for of_part in passes) for name in used}
    of_ranks, layers = mesh.gather_from_all(rank_losses), sum(config.moe_layer_freq)
    losses = {
        name: result.loss.new_tensor(sum(of_rank[name] for of_rank in of_ranks) / (coefficient * layers))
        for name, coefficient in used.items()
    }
    return replace(result, metrics=result.metrics | losses)


def token_weights(tree: PrefixTree, sequence_weights: np.ndarray) -> np.ndarray:
    """For each stream token, the sum of ``sequence_weights`` [Q] over the sequences through it: float64 [N].

    With weights of 1 this is the number of sequences through the token. The sums run from the leaves up, so a small
    weight is not lost to rounding next to a large one in another subtree.
    """
    weights = np.zeros(tree.num_nodes, dtype=np.float64)
    np.add.at(weights, tree.sequence_node, sequence_weights)
    totals = weights.tolist()
    parents = tree.node_parent.tolist()
    for node in range(tree.num_nodes - 1, -1, -1):
        if parents[node] >= 0:
            totals[parents[node]] += totals[node]
    return np.repeat(np.asarray(totals, dtype=np.float64), np.diff(tree.node_start))
