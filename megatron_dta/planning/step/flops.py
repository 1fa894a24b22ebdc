"""Counts the floating-point operations that a step's forward and backward need at least.

A product with a weight of n entries takes 2 n operations per token in the forward and 4 n in the backward. Attention
takes 4 and 8 operations per visible pair for each channel of each query head. Work that is done a second time
(recomputation, the scores in attention's backward) is not counted, and neither are logits of rows that nothing trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.costs.model import layer_weights
from megatron_dta.planning.step.plan import StepPlan


@dataclass(frozen=True)
class StepCounts:
    """Numbers of tokens, visible (query, key) pairs and rows of logits in a step's forest."""

    tokens: int
    pairs: int
    rows: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepCounts:
        """Counts of a plan; a shared token counts as often as it occurs in the plan's forest."""
        tree = plan.segments.tree
        return cls(tree.num_tokens, int(tree.position.astype(np.int64).sum()) + tree.num_tokens, len(plan.row_stream))

    @classmethod
    def without_sharing(cls, plan: StepPlan) -> StepCounts:
        """Counts of the same sequences, each computed separately."""
        lengths = plan.segments.tree.sequence_lengths.astype(np.int64)
        return cls(int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum()), plan.num_pairs)

    def flops(
        self,
        num_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int,
        kv_channels: int,
        vocab_size: int,
        swiglu: bool = True,
        num_experts: int = 0,
    ) -> float:
        """Operations of a decoder, forward and backward. The arguments have Megatron's names.

        Args:
            ffn_hidden_size: feed-forward width per token; with experts, the sum of the widths of a token's experts.
            num_experts: number of experts that the router of each layer chooses from.
        """
        width = num_attention_heads * kv_channels
        weights = layer_weights(hidden_size, ffn_hidden_size, width, num_query_groups * kv_channels, swiglu)
        weights += hidden_size * num_experts
        gemm = 6.0 * num_layers * weights * self.tokens
        attention = 12.0 * num_layers * width * self.pairs
        return gemm + attention + 6.0 * hidden_size * vocab_size * self.rows
