"""Computes the balancing loss of experts on a tree; it equals that of training each sequence alone.

For one sequence of T tokens in one layer, Megatron's sequence-level loss (``seq_aux_loss``) is

    coefficient x E x sum over experts of (tokens routed to the expert / (K T)) x (mean score of the expert)

with E experts, of which K are chosen for each token. The loss of a step is the mean over its sequences, summed over
layers; a sequence counts up to its last trained token. The routed fraction is a constant for the gradient, so the
gradient of a token's score of expert e is

    sum over the sequences through the token of  coefficient E / (K T^2 Q) x tokens of the sequence routed to e

with Q sequences in the step. When the backward of a segment begins, every sequence through it has run forward to its
end. One pass therefore suffices, and the result does not depend on segments, packs or ranks.

Legend: N stream tokens, n tokens of a segment, A tokens of its ancestors, L layers with experts, Q sequences of this
rank.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dta.core.engine.device_plan import DevicePlan
from megatron_dta.core.model.attention.token_routing import TokenRouting
from megatron_dta.core.model.kernel_types import accumulation_dtype
from megatron_dta.core.planning.step.plan import StepPlan


class BalanceLoss:
    """The balancing loss of one step on one rank.

    Args:
        layer_numbers: Megatron's numbers of the layers with experts.
        num_sequences: sequences of the step on all ranks, Q of the formula above.
    """

    def __init__(
        self, step: StepPlan, plan: DevicePlan, layer_numbers: list[int], config: TransformerConfig, num_sequences: int
    ) -> None:
        self.plan, self.layer_numbers = plan, layer_numbers
        self.num_experts, topk = config.num_moe_experts, config.moe_router_topk
        # With sequence and context parallelism, each rank of the group routes a part of the tokens. Experts on tensor
        # groups need sequence parallelism.
        group = parallel_state.get_tensor_and_context_parallel_group()
        self.group = group if group.size() > 1 else None
        coefficient = config.moe_aux_loss_coeff * self.num_experts / (topk * num_sequences)
        dtype = accumulation_dtype(config.params_dtype)
        tree, device = step.segments.tree, plan.stream.device
        last = tree.node_start[np.asarray(tree.sequence_node) + 1] - 1
        order = np.argsort(last, kind="stable")
        self.last = last[order].astype(np.int64)
        self.last_Q = torch.from_numpy(self.last).to(device)
        lengths = np.asarray(tree.sequence_lengths, dtype=np.float64)[order]
        self.weights_Q = torch.from_numpy(coefficient / lengths**2).to(device, dtype)
        # NaN until a sequence has run to its end, so that a premature request for a gradient is noticed.
        size = len(last), len(layer_numbers), self.num_experts
        self.loads_QLE = torch.full(size, torch.nan, dtype=dtype, device=device)
        self.experts_NLK = torch.zeros(tree.num_tokens, len(layer_numbers), topk, dtype=torch.int16, device=device)
        starts, ends = step.segments.segment_start, tree.subtree_end
        self.reach = [int(ends[a:b].max(initial=a)) for a, b in itertools.pairwise(starts.tolist())]

    def store(self, segment: int, routing: TokenRouting) -> None:
        """Store the experts of a segment's first forward, and the loads of the sequences that end in the segment."""
        begin, end = self.plan.start[segment], self.plan.start[segment + 1]
        experts_LnK = torch.stack([routing.balanced[number] for number in self.layer_numbers])
        if self.group is not None:
            experts_LnK = _joined(experts_LnK, self.group)
        self.experts_NLK[begin:end] = experts_LnK[:, : end - begin].transpose(0, 1)
        first, beyond = np.searchsorted(self.last, [begin, end]).tolist()
        if first == beyond:
            return
        keys = torch.cat([self.plan.path_of(segment), self.plan.stream[begin:end]])
        last_Q1 = self.last_Q[first:beyond, None]
        passed = ((keys <= last_Q1) & (last_Q1 < self.plan.subtree_end[keys])).to(self.loads_QLE.dtype)
        for layer in range(len(self.layer_numbers)):
            routed = passed.new_zeros(len(keys), self.num_experts)
            routed.scatter_(1, self.experts_NLK[keys, layer].long(), 1.0)
            self.loads_QLE[first:beyond, layer] = passed @ routed

    def gradient(self, segment: int, layer_number: int) -> Tensor:
        """Gradient [n, E] by the scores of a segment's tokens in one layer."""
        layer = self.layer_numbers.index(layer_number)
        begin, end = self.plan.start[segment], self.plan.start[segment + 1]
        ending = slice(*np.searchsorted(self.last, [begin, self.reach[segment]]).tolist())
        token_n1, end_n1 = self.plan.stream[begin:end, None], self.plan.subtree_end[begin:end, None]
        passes = (token_n1 <= self.last_Q[ending]) & (self.last_Q[ending] < end_n1)
        return passes.to(self.weights_Q.dtype) @ (self.weights_Q[ending, None] * self.loads_QLE[ending, layer])


def _joined(experts_LrK: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """The rows of all ranks of ``group``, in rank order."""
    local = experts_LrK.transpose(0, 1).to(torch.int32).contiguous()
    gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    torch.distributed.all_gather_into_tensor(gathered, local, group=group)
    return gathered.transpose(0, 1)
