"""Counts the floating-point operations that a step's forward and backward need at least.

A product with a weight of n entries takes 2 n operations per token in the forward and 4 n in the backward. Attention
takes 4 and 8 operations per visible pair for each channel of each query head. A recurrence has a fixed number of
operations per token (``DecoderShape.recurrent_operations``), and twice as many in the backward. Work that is done a
second time (recomputation, the scores in attention's backward) is not counted, and neither are logits of rows that
nothing trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.shapes.decoder import DecoderShape


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

    def flops(self, shape: DecoderShape) -> float:
        """Operations of forward and backward of a decoder."""
        gemm = 6.0 * shape.layer_weights * self.tokens
        attention = 12.0 * shape.num_attention_layers * shape.pair_width * self.pairs
        recurrence = 3.0 * shape.recurrent_operations * self.tokens
        return gemm + attention + recurrence + 6.0 * shape.hidden_size * shape.vocab_size * self.rows
