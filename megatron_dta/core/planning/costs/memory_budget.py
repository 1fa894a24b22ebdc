"""Adds up the memory that a rank's ops need, and compares it with a limit.

Weights, gradients and optimizer states are constant through a step and not part of it. The last segment of a path keeps
its activations for free, because its backward, which needs them, is the next op. Virtual stages whose layers are of
other kinds than each other have bytes of their own (``StageBytes``).

PyTorch's allocator does not split a free block if less than 1 MiB would remain, and counts the whole block as
allocated. A budget therefore leaves the share ``UNDIVIDED`` of a step's bytes free. The limit then holds for the peak
that the allocator reports (``torch.cuda.max_memory_allocated``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_dta.core.planning.costs.segment_bytes import SegmentBytes
from megatron_dta.core.planning.segments.plan import OpKind

if TYPE_CHECKING:
    from megatron_dta.core.planning.costs.state_bytes import StateBytes, StepStates

GIB = float(1 << 30)
# Share of a step's bytes that is lost to blocks of the allocator that are slightly larger than their tensors.
UNDIVIDED = 1 / 128


class StageBytes(NamedTuple):
    """The bytes of a virtual stage.

    Attributes:
        segments: coefficients of its segments; those per layer are means over its layers.
        states: bytes of the states of its recurrences; None if it has none.
    """

    segments: SegmentBytes
    states: StateBytes | None = None


@dataclass(frozen=True)
class MemoryBudget:
    """The memory limit of a step on the ranks of a pipeline.

    Attributes:
        gib: total memory that each rank may use.
        constant: bytes of weights, gradients and optimizer states on each pipeline rank; part of ``gib``.
        stages: bytes of everything else, on each virtual stage.
        automatic: whether ``gib`` is what the GPUs have, rather than ``--tree-memory-gib``.
    """

    gib: float
    constant: tuple[float, ...]
    stages: tuple[StageBytes, ...]
    automatic: bool = False

    @property
    def has_states(self) -> bool:
        """Whether any stage has a recurrence."""
        return any(stage.states is not None for stage in self.stages)

    def available(self, rank: int) -> float:
        """Bytes that a step's tensors may take on a pipeline rank."""
        return (self.gib * GIB - self.constant[rank]) * (1 - UNDIVIDED)

    def needed_gib(self, missing: float) -> float:
        """The limit with which ``missing`` bytes more are available on every pipeline rank."""
        return self.gib + missing / (1 - UNDIVIDED) / GIB


class ChunkTensors(NamedTuple):
    """What a model chunk of a rank holds.

    Attributes:
        kept: for each segment, whether it keeps its activations.
        num_slots: number of its K/V slots.
        layers: number of its layers.
        has_input: whether a stage precedes it.
        bytes: coefficients of its segments.
        states: the states of its recurrences; None if it has none.
    """

    kept: Sequence[bool]
    num_slots: int
    layers: float
    has_input: bool
    bytes: SegmentBytes
    states: StepStates | None = None

    @property
    def pool_bytes(self) -> float:
        """Bytes of its K/V slots and of the slots of its open forks, throughout the step."""
        of_states = 0.0 if self.states is None else self.states.in_flight
        return self.num_slots * self.bytes.slot(self.layers) + of_states


def peak_bytes(
    ops: Sequence[tuple[OpKind, int, int]],
    lengths: Sequence[int],
    path_tokens: Sequence[int],
    chunks: Sequence[ChunkTensors],
) -> float:
    """Peak bytes of a rank's ops, including K/V slots, slots of open forks and fixed bytes.

    Args:
        ops: (kind, segment, model chunk) in order.
        lengths, path_tokens: for each segment, its number of tokens, and that of its root path including its own.
        chunks: the rank's model chunks.
    """
    none = [0.0] * len(lengths)
    of_states = [
        (none, none) if chunk.states is None else (chunk.states.kept.tolist(), chunk.states.work.tolist())
        for chunk in chunks
    ]
    live = peak = 0.0
    for kind, segment, index in ops:
        chunk, (of_exits, at_work) = chunks[index], of_states[index]
        sizes = chunk.bytes
        activations = sizes.kept(chunk.layers) * lengths[segment] + of_exits[segment]
        keeps = chunk.kept[segment]
        held = activations if keeps else chunk.has_input * sizes.input_per_token * lengths[segment]
        work = sizes.work(lengths[segment], path_tokens[segment]) + at_work[segment]
        if kind is OpKind.FORWARD:
            live += held
        # A segment's activations exist in its backward, and at the end of a forward that keeps them.
        recomputed = 0.0 if keeps or kind is OpKind.FORWARD else activations
        peak = max(peak, live + work + recomputed)
        if kind is OpKind.BACKWARD:
            live -= held
    return max(chunk.bytes.fixed for chunk in chunks) + sum(chunk.pool_bytes for chunk in chunks) + peak
