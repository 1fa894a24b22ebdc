"""Predicts the memory that the states of a recurrence take in a step, in addition to what ``segment_bytes`` counts.

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

import numpy as np

from megatron_dta.core.planning.segments.runs import ForkCounts
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.mixer import LayerBytes, LayerSizes


def _attention_bytes(shape: DecoderShape, sizes: LayerSizes) -> LayerBytes:
    """Bytes of a token in a layer with attention of a hybrid model.

    It keeps the queries before their norm and rotated, its output and the gated output, and in float32 the two factors
    of the latter; without a gate the mixed rows and the output.
    """
    element_bytes, tensor_size, hidden, ffn = sizes
    query, kv = shape.query_width / tensor_size, shape.kv_width / tensor_size
    gated = shape.attention_output_gate
    kept = element_bytes * (2 * hidden + (4 if gated else 2) * query + 2 * kv) + ffn[0] + 8 * gated * query
    kept += 4 * shape.num_attention_heads / tensor_size
    return LayerBytes(kept, max(ffn[1], element_bytes * 6 * query + 8 * gated * query))


def mixed_layer_bytes(shape: DecoderShape, sizes: Sequence[LayerSizes], layers: Sequence[int]) -> LayerBytes:
    """What ``layers`` keep on average, and the working memory of the largest kind. In plain PyTorch they take more.

    Args:
        sizes: for layers without experts, and with them.
    """
    counted, parts = [], 1 if shape.hybrid_layer_pattern is None else 2
    for layer, count in shape.kinds(layers):
        # A layer of one part has one norm and one residual instead of two.
        of_layer = sizes[shape.moe_layers[layer]]
        ffn = of_layer.ffn if shape.feeds_forward(layer) else (0.0, 0.0)
        of_layer = of_layer._replace(hidden=of_layer.hidden / parts, ffn=ffn)
        if shape.has_mixer(layer):
            counted.append((count, shape.mixer.layer_bytes(of_layer)))
        elif shape.mixes(layer):
            counted.append((count, _attention_bytes(shape, of_layer)))
        else:
            counted.append((count, LayerBytes(2 * of_layer.element_bytes * of_layer.hidden + ffn[0], ffn[1])))
    kept = sum(count * of_kind.kept for count, of_kind in counted) / len(layers)
    return LayerBytes(kept, max(of_kind.work for _, of_kind in counted))


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
        count = sum(shape.is_recurrent(layer) for layer in (range(shape.num_layers) if layers is None else layers))
        if not count:
            return None
        accumulator = max(4, element_bytes)
        state = shape.mixer.state / ranks * accumulator
        count_before, channels = shape.mixer.rows
        rows = count_before * channels / ranks
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
