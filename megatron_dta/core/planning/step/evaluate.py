"""Evaluates a step with given segments: the activations that it keeps, its predicted time, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.memory_budget import GIB, MemoryBudget, StageBytes
from megatron_dta.core.planning.costs.model import segment_counts
from megatron_dta.core.planning.segments.plan import SegmentPlan, SegmentTree
from megatron_dta.core.planning.segments.recompute import choose_kept_by_memory, choose_kept_segments
from megatron_dta.core.planning.step.passes import PassPlan, PipelineShape, plan_passes, stage_peak_bytes
from megatron_dta.core.tree import PrefixTree

if TYPE_CHECKING:
    from megatron_dta.core.planning.costs.state_bytes import StepStates


@dataclass(frozen=True)
class StepChoice:
    """A plan of segments with the activations that they keep.

    Attributes:
        segments: the forest and its segments.
        kept: bool [num_segments], segments that keep their activations.
        memory_tokens: budget of tokens in flight of the segment plan; 0 for packs.
        seconds: predicted time of forward and backward on one replica.
        passes: training and forward-only pass if the choice already needed them, else None.
        peak_bytes: maximum number of bytes that each pipeline rank holds at once; None without a limit in bytes.
    """

    segments: SegmentPlan
    kept: np.ndarray
    memory_tokens: int
    seconds: float
    passes: tuple[PassPlan, PassPlan] | None = None
    peak_bytes: tuple[float, ...] | None = None


def evaluate_plan(
    segments: SegmentPlan,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    memory_tokens: int,
    activation_tokens: int | None = None,
) -> tuple[StepChoice | None, float, float]:
    """Choose the kept activations of a plan on a single stage, and predict its time.

    Returns:
        (the choice, or None if it does not fit; predicted seconds without launch times and recomputation; missing
        bytes, 0 if it fits).
    """
    model, budget = shape.cost_model, shape.memory
    counts = segment_counts(segments, loss_masks)
    forward, backward = model.segment_seconds(*counts)
    seconds = float((forward + backward).sum())
    work = float(sum(map(np.sum, model.linear_seconds(*counts))))
    if budget is None:
        kept = choose_kept_segments(segments, activation_tokens)
    else:
        stage, states = budget.stages[0], None
        if stage.states is not None:
            from megatron_dta.core.planning.costs.state_bytes import StepStates
            from megatron_dta.core.planning.segments.runs import SegmentRuns

            runs = SegmentRuns.of(segments)
            states = StepStates.of([runs.counts], stage.states, int(runs.forks_in_flight.max(initial=0)))
        tensors = StageTensors(stage, shape.layers[0], segments.peak_in_flight_tokens, states)
        kept, missing = keep_within(segments, tensors, budget.available(0), forward)
        if kept is None:
            return None, work, missing
    seconds += float(forward[~kept].sum())
    return StepChoice(segments, kept, memory_tokens, seconds), work, 0.0


class StageTensors(NamedTuple):
    """What the only stage holds in a step besides activations.

    Attributes:
        sizes: bytes of the stage.
        layers: number of its layers.
        num_slots: number of its K/V slots.
        states: the states of its recurrences; None if it has none.
    """

    sizes: StageBytes
    layers: int
    num_slots: int
    states: StepStates | None


def keep_within(
    tree: SegmentTree, stage: StageTensors, available: float, seconds: np.ndarray
) -> tuple[np.ndarray | None, float]:
    """The segments that keep their activations within ``available`` bytes (bool, None if even fewer are too many), and
    the missing bytes.

    Args:
        seconds: time of each forward, in any unit.
    """
    sizes, states = stage.sizes.segments, stage.states
    slots, unit = sizes.fixed + stage.num_slots * sizes.slot(stage.layers), sizes.kept(stage.layers)
    kept_tokens, working = tree.lengths, sizes.work(tree.lengths, tree.in_flight_tokens)
    if states is not None:
        slots, working = slots + states.in_flight, working + states.work
        kept_tokens = kept_tokens + np.ceil(states.kept / unit).astype(np.int64)
    needed = np.ceil(kept_tokens + working / unit).astype(np.int64)
    left, most = int((available - slots) // unit), int(needed.max(initial=0))
    if most > left:
        return None, slots + unit * most - available
    return choose_kept_by_memory(tree, left, needed, seconds, kept_tokens), 0.0


def with_peak(choice: StepChoice, shape: PipelineShape) -> StepChoice:
    """Add the passes and their peak memory to a choice of ``evaluate_plan`` if bytes are limited."""
    if shape.memory is None:
        return choice
    segments = choice.segments
    passes = plan_passes(segments, np.zeros(segments.num_segments), choice.kept, shape)
    peak = stage_peak_bytes(segments, passes[0], shape, 0)
    return replace(choice, passes=passes, peak_bytes=(peak,))


def choose_kept_within(
    segments: SegmentPlan, loss_masks: Sequence[np.ndarray] | None, shape: PipelineShape
) -> StepChoice:
    """Choose the kept activations of given segments, for example of packs, within the memory of the only stage."""
    choice, _, missing = evaluate_plan(segments, loss_masks, shape, 0)
    if choice is None:
        raise out_of_memory_error(shape.memory, 0, missing, segments.tree, segments.segment_tokens, None)
    return with_peak(choice, shape)


def out_of_memory_error(
    memory: MemoryBudget, rank: int, missing: float, tree: PrefixTree, segment_tokens: int, memory_tokens: int | None
) -> InputError:
    """The error for a step that lacks ``missing`` bytes on pipeline rank ``rank``; it names a limit that suffices."""
    constant, needed = memory.constant[rank] / GIB, memory.needed_gib(missing)
    enough = math.ceil(100 * needed + 1e-6) / 100
    longest = int(tree.sequence_lengths.max(initial=0))
    in_flight = f"with {memory_tokens} tokens in flight" if memory_tokens else f"of sequences of {longest} tokens"
    where = f" on pipeline rank {rank}" if len(memory.constant) > 1 else ""
    what = f"--tree-memory-gib {memory.gib:g}"
    fix = f"set it to {enough:.2f} or more, or divide the model over more ranks"
    if memory.automatic:
        what = f"GPU memory ({memory.gib:g} GiB for tensors)"
        fix = "divide the model over more ranks, or move optimizer states to the host (--optimizer-cpu-offload)"
    return InputError(
        f"{what} is {missing / GIB:.2f} GiB too small{where}: weights, gradients and optimizer states take "
        f"{constant:.2f} GiB, and a step {in_flight} in segments of {segment_tokens} needs at least "
        f"{needed - constant:.2f} GiB; {fix}"
    )
