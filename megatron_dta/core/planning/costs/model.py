"""Predicts the cost of a forest, so that work can be divided before it runs.

    seconds of a segment's forward, or backward = max(floor, a * tokens + b * pairs + c * edges)

tokens    unique tokens; every GEMM of the layers runs once for each
pairs     (query, key) pairs that attention computes; a token at position p has p + 1
edges     unique (parent, child) pairs that some sequence trains; each needs a row of logits
floor     time that the host needs to launch the kernels of a pass of any length; the device computes meanwhile,
          so the larger of the two counts and not their sum

Each coefficient covers forward and backward, and has a share for the forward. The share gives the cost of recomputing a
segment's forward, and the time of a pipeline's forward.

Before a forest is cut its segments are unknown. ``CostModel.cost`` is therefore linear in the counts, and so a sum over
the nodes of the forest. Only ratios of costs decide a partition, so the coefficients may have other units than seconds.

``CostModel.from_shape`` derives the coefficients from the FLOPs of a model, ``costs.gpus`` from the data sheet of a
GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentPlan
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.tree.trained_edges import merge_intervals, trained_intervals

# Rates in FLOP/s of one H200 in bfloat16, forward and backward: large GEMMs at two thirds of their peak, attention.
GEMM_RATE = 520e12
ATTENTION_RATE = 500e12
# Seconds that a host needs to launch a layer, forward and backward, as measured with an H200.
FORWARD_FLOOR_PER_LAYER, BACKWARD_FLOOR_PER_LAYER = 1.0e-3, 2.2e-3
FLOOR_SECONDS_PER_LAYER = FORWARD_FLOOR_PER_LAYER + BACKWARD_FLOOR_PER_LAYER
# Forward plus backward, in forwards. Attention's backward recomputes the scores (5 products for the forward's 2).
GEMM_PASSES = 3.0
ATTENTION_PASSES = 3.5


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the cost model; the defaults are ``from_shape`` of Qwen3-1.7B.

    Attributes:
        seconds_per_token, seconds_per_pair, seconds_per_edge: a, b, c; not negative, and the first above 0.
        floor_seconds: minimum time of a segment, forward and backward together.
        segment_tokens: number of tokens in a full segment (``--tree-segment-tokens``).
        forward_token_share, forward_pair_share, forward_edge_share, forward_floor_share: the forward's share of each of
            the four, from 0 to 1.
    """

    seconds_per_token: float = 1.6261e-05
    seconds_per_pair: float = 1.6056e-09
    seconds_per_edge: float = 3.5904e-06
    floor_seconds: float = 8.96e-02
    segment_tokens: int = 2048
    forward_token_share: float = 1 / GEMM_PASSES
    forward_pair_share: float = 1 / ATTENTION_PASSES
    forward_edge_share: float = 1 / GEMM_PASSES
    forward_floor_share: float = FORWARD_FLOOR_PER_LAYER / FLOOR_SECONDS_PER_LAYER

    @classmethod
    def from_shape(cls, shape: DecoderShape, segment_tokens: int = 2048) -> CostModel:
        """Coefficients from the FLOPs of a decoder at this module's rates.

        A product with a weight of n entries takes 2 n FLOPs per token; scores and values of attention take 4 FLOPs per
        pair for each channel of each query head.
        """
        return cls(
            seconds_per_token=GEMM_PASSES * (2 * shape.layer_weights + shape.recurrent_operations) / GEMM_RATE,
            seconds_per_pair=ATTENTION_PASSES * 4 * shape.num_attention_layers * shape.pair_width / ATTENTION_RATE
            # A segment expands the latents of its path, which has as many tokens as pairs for each token of it.
            + GEMM_PASSES * 2 * shape.num_attention_layers * shape.expansion / segment_tokens / GEMM_RATE,
            seconds_per_edge=GEMM_PASSES * 2 * shape.hidden_size * shape.vocab_size / GEMM_RATE,
            floor_seconds=FLOOR_SECONDS_PER_LAYER * shape.num_layers,
            segment_tokens=segment_tokens,
        )

    @classmethod
    def of_passes(
        cls,
        token: Sequence[float],
        pair: Sequence[float],
        edge: Sequence[float],
        floor: Sequence[float],
        segment_tokens: int,
    ) -> CostModel:
        """The model with these seconds, each of the forward and of the backward."""
        sums = [sum(passes) for passes in (token, pair, edge, floor)]
        shares = [
            passes[0] / total if total else 0.5 for passes, total in zip((token, pair, edge, floor), sums, strict=True)
        ]
        return cls(*sums, segment_tokens, *shares)

    def cost(self, tokens: np.ndarray, pairs: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Cost of forests with these counts (arrays of one shape, or numbers). The cost is linear in the counts.

        A segment's floor is not a sum over nodes. Instead, a token costs at least its share of the floor of a full
        segment: short segments take a time nearly proportional to their tokens, long ones are above the floor.
        """
        per_token = max(self.seconds_per_token, self.floor_seconds / self.segment_tokens)
        return per_token * tokens + self.seconds_per_pair * pairs + self.seconds_per_edge * edges

    @property
    def tokens_of_floor(self) -> int:
        """Tokens from which a segment takes longer than its launches, without attention."""
        return math.ceil(self.floor_seconds / self.seconds_per_token)

    def linear_seconds(self, tokens: np.ndarray, pairs: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of forward and backward without the floor, float64 of the counts' shape."""
        parts = (
            (self.seconds_per_token, self.forward_token_share, tokens),
            (self.seconds_per_pair, self.forward_pair_share, pairs),
            (self.seconds_per_edge, self.forward_edge_share, edges),
        )
        forward, backward = np.zeros(np.shape(tokens)), np.zeros(np.shape(tokens))
        for seconds, share, count in parts:
            forward += seconds * share * np.asarray(count, dtype=np.float64)
            backward += seconds * (1 - share) * np.asarray(count, dtype=np.float64)
        return forward, backward

    def nanoseconds(self, tokens: np.ndarray, pairs: np.ndarray, edges: np.ndarray) -> list[int]:
        """Forward and backward together, without the floor."""
        return (1e9 * sum(self.linear_seconds(tokens, pairs, edges))).astype(np.int64).tolist()

    @property
    def floors(self) -> tuple[float, float]:
        """Minimum seconds of a segment's forward and of its backward."""
        forward = self.floor_seconds * self.forward_floor_share
        return forward, self.floor_seconds - forward

    def segment_seconds(
        self, tokens: np.ndarray, pairs: np.ndarray, edges: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the forward and of the backward of segments, float64 of the counts' shape."""
        both = zip(self.linear_seconds(tokens, pairs, edges), self.floors, strict=True)
        forward, backward = (np.maximum(seconds, floor) for seconds, floor in both)
        return forward, backward


DEFAULT_COSTS = CostModel()


def segment_counts(
    plan: SegmentPlan, loss_masks: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of tokens, (query, key) pairs and trained edges of each segment, int64 [N] each; see ``CostModel``.

    An edge counts in the segment of its parent, whose row of logits it needs.

    Args:
        loss_masks: for each sequence bool [T], False at position 0; None to train all positions but the first.
    """
    tree, bounds = plan.tree, np.asarray(plan.segment_start, dtype=np.int64)
    intervals = trained_intervals(tree, loss_masks)
    _, begin, end = merge_intervals(np.zeros_like(intervals.begin), intervals.begin, intervals.end)
    # Counted by runs. The parent of a child that does not begin a node is right before it in the stream.
    edges = np.diff(_below(begin, end, bounds + 1))
    first = tree.node_start[:-1][tree.node_parent >= 0]
    interval = np.searchsorted(begin, first, side="right") - 1
    trained = (interval >= 0) & (first < end[interval]) if len(begin) else np.zeros(len(first), dtype=bool)
    parent = tree.node_start[tree.node_parent[tree.node_parent >= 0].astype(np.int64) + 1] - 1
    for positions, sign in ((first[trained] - 1, -1), (parent[trained], 1)):
        np.add.at(edges, np.searchsorted(bounds, positions, side="right") - 1, sign)
    return plan.lengths, plan.attention_pairs, edges


def _below(begin: np.ndarray, end: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number of members of disjoint sorted intervals below each place, int64."""
    if not len(begin):
        return np.zeros(len(positions), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(end - begin)])
    interval = np.maximum(np.searchsorted(begin, positions, side="left") - 1, 0)
    return before[interval] + np.clip(positions - begin[interval], 0, (end - begin)[interval])
