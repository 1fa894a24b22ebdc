"""Predicts the memory that the states of gated delta net take in a step, in addition to what ``segment_bytes`` counts.

    open forks    the state and the last rows before the convolution at each run's end that later segments continue, and
                  the gradients of both, in all layers, from the segment's forward to its backward
    exits         the states at the ends of a segment's runs that have children anywhere, in all layers, as long as the
                  segment's activations exist
    working       while a segment runs: the states that its runs begin and end with in one layer, and their gradients

``mixed_layer_bytes`` counts what the layers of hybrid models keep for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_dta.core.planning.segments.runs import ForkCounts
from megatron_dta.core.shapes.decoder import DecoderShape

# Tokens of a chunk of the gated delta rule, at whose begin its kernels store the state.
_CHUNK = 64


class LayerBytes(NamedTuple):
    """Bytes of a token in a layer: kept until the backward, and in use during the backward."""

    kept: float
    work: float


class LayerSizes(NamedTuple):
    """What the bytes of a layer depend on besides the shape, for one token on one rank.

    Attributes:
        element_bytes, tensor_size: as in ``RankTensors``.
        hidden: channels of the hidden states.
        ffn: bytes that the feed-forward layer keeps, and its working memory.
    """

    element_bytes: int
    tensor_size: int
    hidden: float
    ffn: tuple[float, float]


def hybrid_layer_bytes(shape: DecoderShape, sizes: LayerSizes) -> tuple[LayerBytes, LayerBytes]:
    """Bytes of a token in a fused layer with attention, and in one with gated delta net.

    Gated delta net keeps its input, the projected rows, the filtered rows, the output of the rule and the gated output,
    and the rest of the layer the residual stream and what its feed-forward layer keeps. Its backward holds the products
    of the rule's chunks, their gradients and those of the rows. Gated attention keeps the queries before their norm and
    rotated, its output and the gated output, and in float32 the two factors of the latter.
    """
    element_bytes, tensor_size, hidden, ffn = sizes
    around = 2 * hidden + ffn[0] / element_bytes
    channels, values, heads = (width / tensor_size for width in _widths(shape))
    keys, chunk_states = heads * shape.linear_key_head_dim, shape.linear_state / tensor_size / _CHUNK
    rows = channels + values + 2 * heads
    recurrent = element_bytes * (around + rows + channels + 2 * values) + 28 * heads
    query, kv = shape.query_width / tensor_size, shape.kv_width / tensor_size
    attention = element_bytes * (around + 4 * query + 2 * kv) + 8 * query + 4 * shape.num_attention_heads / tensor_size
    rule = element_bytes * (2 * channels + 5 * keys + 6 * values + 2 * chunk_states + 2 * _CHUNK * heads)
    filters = 8 * channels + element_bytes * 2 * channels
    return (
        LayerBytes(attention, max(ffn[1], element_bytes * 6 * query + 8 * query)),
        LayerBytes(recurrent, max(rule + element_bytes * rows, filters + element_bytes * rows, ffn[1])),
    )


def plain_layer_bytes(shape: DecoderShape, sizes: LayerSizes) -> tuple[LayerBytes, LayerBytes]:
    """``hybrid_layer_bytes`` of plain modules, which keep the inputs of each of their operations.

    The rule in plain PyTorch holds about ten matrices of a chunk's tokens by its tokens for each head. Runs that are
    shorter than the chunks of their level need as much as full chunks, which is not counted.
    """
    element_bytes, tensor_size, hidden, ffn = sizes
    accumulator = max(4, element_bytes)
    # The norm of gated delta net computes in float64 unless the model is in 16 bits.
    of_norm = 4 if element_bytes < 4 else 8
    around = (2 * element_bytes + 4 * accumulator) * hidden + ffn[0]
    channels, values, heads = (width / tensor_size for width in _widths(shape))
    keys, chunk_states = heads * shape.linear_key_head_dim, shape.linear_state / tensor_size / _CHUNK
    recurrent = around + 2 * element_bytes * channels + 6 * of_norm * values + (6 * accumulator + of_norm) * heads
    query, kv = shape.query_width / tensor_size, shape.kv_width / tensor_size
    attention = around + (8 * element_bytes + 2 * accumulator) * query + 2 * accumulator * kv
    attention += 8 * shape.num_attention_heads / tensor_size + 64
    rule = accumulator * (11 * (_CHUNK * heads + keys) + 6 * values + 4 * chunk_states)
    rows = 8 * element_bytes * (channels + values + 2 * heads)
    return (
        LayerBytes(attention, max(ffn[1], element_bytes * 6 * (query + kv) + 2 * accumulator * query)),
        LayerBytes(recurrent + 64, max(rule + rows, ffn[1])),
    )


def mixed_layer_bytes(shape: DecoderShape, sizes: LayerSizes, fused: bool, attention_share: float) -> LayerBytes:
    """What layers keep on average, and the working memory of the larger kind, where this share has attention."""
    of_kinds = (hybrid_layer_bytes if fused else plain_layer_bytes)(shape, sizes)
    shares = attention_share, 1 - attention_share
    kept = sum(share * of_kind.kept for share, of_kind in zip(shares, of_kinds, strict=True))
    return LayerBytes(kept, max(of_kind.work for share, of_kind in zip(shares, of_kinds, strict=True) if share))


def _widths(shape: DecoderShape) -> tuple[int, int, int]:
    """Channels that are filtered, channels of the values, and value heads."""
    return shape.linear_channels, shape.linear_width, shape.linear_num_value_heads


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
    def of_shape(
        cls, shape: DecoderShape, element_bytes: int, ranks: int = 1, layers: Sequence[int] | None = None
    ) -> StateBytes | None:
        """The bytes of a decoder's ``layers`` (None for all) on one of ``ranks`` that divide their heads; None if all
        of them have attention.
        """
        count = sum(shape.is_linear(layer) for layer in (range(shape.num_layers) if layers is None else layers))
        if not count:
            return None
        accumulator = max(4, element_bytes)
        state = shape.linear_state / ranks * accumulator
        rows = (shape.linear_conv_kernel_dim - 1) * shape.linear_channels / ranks
        return cls(count * (2 * state + rows * (element_bytes + accumulator)), count * state, state)


@dataclass(frozen=True)
class StepStates:
    """Bytes of states that a plan of segments needs on a rank, or on a virtual stage of it.

    Attributes:
        in_flight: slots of open forks, throughout the step.
        kept: of each segment, as long as its activations exist, float64 [num_segments].
        work: of each segment while it runs, float64 [num_segments].
    """

    in_flight: float
    kept: np.ndarray
    work: np.ndarray

    @classmethod
    def of(cls, ranks: Sequence[ForkCounts], sizes: StateBytes, num_slots: int) -> StepStates:
        """The most bytes of any of the ``ranks`` that run the segments together, often a single one.

        Args:
            num_slots: of open forks, on the rank with most.
        """
        # Entries and exits of a level with their gradients, beside the segment's states and theirs.
        at_work = [2 * forks.num_states + 4 * forks.widest_levels for forks in ranks]
        kept = np.max([forks.inner_forks for forks in ranks], axis=0)
        return cls(sizes.open_fork * num_slots, sizes.exit * kept, sizes.state * np.max(at_work, axis=0))
