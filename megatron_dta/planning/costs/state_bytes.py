"""Predicts the memory that the states of gated delta net take in a step, beside what ``segment_bytes`` counts.

    open forks    the state and the last rows before the convolution at each run's end that later segments continue, and
                  the gradients by both, in all layers, from the segment's forward to its backward
    exits         the states at the ends of a segment's runs that have children anywhere, in all layers, as long as the
                  segment's activations exist
    working       while a segment runs: the states that its runs begin and end with in one layer, and their gradients

``hybrid_layer_bytes`` counts what the fused layers of hybrid models keep for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.costs.decoder_shape import DecoderShape
from megatron_dta.planning.expert_parallel.merged_segment_tree import MergedSegmentTree, path_totals
from megatron_dta.planning.segments.plan import SegmentPlan
from megatron_dta.planning.segments.runs import SegmentRuns

# Tokens of a chunk of the gated delta rule, at whose begin its kernels store the state.
_CHUNK = 64


def hybrid_layer_bytes(
    shape: DecoderShape, element_bytes: int, tensor_size: int, hidden: float, ffn: tuple[float, float]
) -> tuple[float, float]:
    """Bytes of a token that a fused layer keeps for its backward, on average over the layers, and working memory of the
    backward of a layer, the larger of the two kinds.

    Gated delta net keeps its input, the projected rows, the filtered rows, the output of the rule and the gated output,
    and the rest of the layer the residual stream and what its feed-forward layer keeps. Its backward holds the products
    of the rule's chunks, their gradients and those of the rows. Gated attention keeps the queries before their norm and
    rotated, its output and the gated output, and in float32 the two factors of the latter.

    Args:
        hidden: channels of the hidden states on this rank.
        ffn: bytes of a token that the feed-forward layer keeps, and its working memory.
    """
    around = 2 * hidden + ffn[0] / element_bytes
    channels, values = shape.linear_channels / tensor_size, shape.linear_width / tensor_size
    heads, chunk_states = shape.linear_num_value_heads / tensor_size, shape.linear_state / tensor_size / _CHUNK
    keys = heads * shape.linear_key_head_dim
    rows = channels + values + 2 * heads
    recurrent = element_bytes * (around + rows + channels + 2 * values) + 28 * heads
    query, kv = shape.query_width / tensor_size, shape.kv_width / tensor_size
    attention = element_bytes * (around + 4 * query + 2 * kv) + 8 * query + 4 * shape.num_attention_heads / tensor_size
    share = shape.num_attention_layers / shape.num_layers
    rule = element_bytes * (2 * channels + 5 * keys + 6 * values + 2 * chunk_states + 2 * _CHUNK * heads)
    filters = 8 * channels + element_bytes * 2 * channels
    work = max(
        rule + element_bytes * rows, filters + element_bytes * rows, ffn[1], element_bytes * 6 * query + 8 * query
    )
    return share * attention + (1 - share) * recurrent, work


@dataclass(frozen=True)
class StateBytes:
    """Bytes on a rank.

    Attributes:
        open_fork: of an open fork, in all layers of the rank.
        exit: of a state that a segment keeps for its backward, in all layers of the rank.
        state: of one state in one layer.
    """

    open_fork: float
    exit: float
    state: float

    @classmethod
    def of_shape(cls, shape: DecoderShape, element_bytes: int, ranks: int = 1) -> StateBytes | None:
        """The bytes of a decoder's layers on one of ``ranks`` that divide their heads; None for attention only."""
        layers, accumulator = sum(shape.linear_attention_layers), max(4, element_bytes)
        if not layers:
            return None
        state = shape.linear_state / ranks * accumulator
        rows = (shape.linear_conv_kernel_dim - 1) * shape.linear_channels / ranks
        return cls(layers * (2 * state + rows * (element_bytes + accumulator)), layers * state, state)


@dataclass(frozen=True)
class StepStates:
    """Bytes of states that a plan of segments needs on a rank.

    Attributes:
        in_flight: largest number of open forks in flight, times their bytes.
        kept: of each segment, as long as its activations exist, float64 [num_segments].
        work: of each segment while it runs, float64 [num_segments].
    """

    in_flight: float
    kept: np.ndarray
    work: np.ndarray

    @classmethod
    def of(cls, segments: SegmentPlan, each: StateBytes | None) -> StepStates:
        """The bytes of the states of a plan; zeros for a model without states."""
        if each is None:
            nothing = np.zeros(segments.num_segments)
            return cls(0.0, nothing, nothing)
        runs = SegmentRuns.of(segments)
        # Entries and exits of a level with their gradients, beside the segment's states and theirs.
        work = each.state * (2 * runs.num_states + 4 * runs.widest_levels)
        return cls(each.open_fork * int(runs.forks_in_flight.max(initial=0)), each.exit * runs.inner_forks, work)

    @classmethod
    def of_merged(cls, tree: MergedSegmentTree, plans: Sequence[SegmentPlan], each: StateBytes) -> StepStates:
        """The most bytes of any rank, where ranks with these plans run one tree together."""
        in_flight, kept, work = 0.0, np.zeros(tree.num_segments), np.zeros(tree.num_segments)
        for plan, nodes in zip(plans, tree.segment_of, strict=True):
            own = cls.of(plan, each)
            # A rank has nothing at a node without a segment of its own (-1).
            kept, work = (
                np.maximum(most, np.append(found, 0.0)[nodes]) for most, found in ((kept, own.kept), (work, own.work))
            )
            forks = np.append(SegmentRuns.of(plan).open_forks, 0)[nodes]
            most_forks = path_totals(tree.segment_parent.tolist(), forks.tolist()).max(initial=0)
            in_flight = max(in_flight, each.open_fork * int(most_forks))
        return cls(in_flight, kept, work)
