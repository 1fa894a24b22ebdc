"""Chooses the segments of a step on a pipeline and the activations that they keep, by predicted time.

Each candidate is scheduled and simulated, and its memory is the largest amount that any stage holds at once in that
schedule. Where its busiest stage would still wait, shorter segments are tried too: they fill and drain the pipeline
sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from megatron_dta.core.planning.costs.model import segment_counts
from megatron_dta.core.planning.costs.state_bytes import StepStates
from megatron_dta.core.planning.pipeline.segments import plan_pipeline_segments, rounded
from megatron_dta.core.planning.segments.plan import SegmentPlan, default_memory_tokens
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.planning.segments.runs import SegmentRuns
from megatron_dta.core.planning.step.evaluate import StepChoice, out_of_memory_error
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget, plan_passes, stage_peak_bytes
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS, useful_sizes
from megatron_dta.core.tree import PrefixTree

# Segment sizes to try if none is given.
PIPELINE_SIZES = (4096, 2048, 1024, 512)
# Shares of the tokens in flight whose activations are kept; a pipeline tries them in turn.
KEPT_SHARES = (1.0, 0.7, 0.4, 0.0)
# If the busiest stage of a pipeline computes for less than this share of the step, segments that are shorter by these
# factors are tried as well.
BUSY_ENOUGH = 0.95
SHORTER = (0.75, 0.5)


class _Candidate(NamedTuple):
    """Segments of a pipeline before they are scheduled.

    Attributes:
        seconds: predicted time of the step: exact for equal segments on equal stages, and close for others.
        memory_tokens: budget of tokens in flight with which they were cut.
    """

    seconds: float
    memory_tokens: int
    segments: SegmentPlan


def choose_pipeline_step(
    tree: PrefixTree, loss_masks: Sequence[np.ndarray] | None, shape: PipelineShape, limits: StepBudget
) -> StepChoice:
    """The fastest plan over ``tree`` on several stages; arguments and errors as in ``choose_step``."""
    stages, longest = shape.num_stages, int(tree.sequence_lengths.max(initial=0))
    at_floor = shape.cost_model.tokens_of_floor

    def cut(size: int, budget: int, floor: int) -> _Candidate:
        segments = plan_pipeline_segments(tree, size, budget, stages, shape.max_in_flight_tokens, floor)
        forward, backward = shape.cost_model.segment_seconds(*segment_counts(segments, loss_masks))
        count = max(1, segments.num_segments)
        seconds = float((forward + backward).sum()) / stages * (count + stages - 1) / count
        return _Candidate(seconds, budget, segments)

    if limits.segment_tokens:
        sizes = [limits.segment_tokens]
    elif shape.memory is None and not shape.is_measured:
        sizes = [DEFAULT_SEGMENT_TOKENS * shape.context_size]
    else:
        sizes = useful_sizes(PIPELINE_SIZES, tree, shape)
    candidates = []
    for size in sizes:
        budgets = [limits.memory_tokens or default_memory_tokens(tree, size)]
        if limits.memory_tokens is None and shape.memory is not None:
            budgets.append(longest)
        # Try segments with and without the minimum length of the launch time; shorter ones need less memory.
        candidates += [cut(size, budget, floor) for budget, floor in product(budgets, (0, at_floor))]
    candidates.sort(key=lambda candidate: (candidate.seconds, -candidate.segments.num_segments))
    best = _fastest(candidates if shape.memory is not None else candidates[:1], loss_masks, shape, limits)
    timeline, size = best.passes[0].timeline, best.segments.segment_tokens
    if limits.segment_tokens is None and max(timeline.busy) < BUSY_ENOUGH * timeline.makespan:
        shorter = [cut(rounded(share * size), best.memory_tokens, at_floor) for share in SHORTER]
        best = _fastest(shorter, loss_masks, shape, limits, best)
    return best


def _fastest(
    candidates: Sequence[_Candidate],
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    limits: StepBudget,
    best: StepChoice | None = None,
) -> StepChoice:
    """The fastest of ``best`` and of the candidates that fit into the memory, each scheduled and simulated."""
    missing, stage = np.inf, 0
    for seconds, budget, segments in candidates:
        if best is not None and best.seconds <= seconds:
            continue
        choice, short, rank = _within_memory(segments, loss_masks, shape, budget, limits.activation_tokens)
        if choice is not None and (best is None or choice.seconds < best.seconds):
            best = choice
        if short < missing:
            missing, stage = short, rank
    if best is None:
        segments = candidates[-1].segments
        raise out_of_memory_error(
            shape.memory, stage, missing, segments.tree, segments.segment_tokens, limits.memory_tokens
        )
    return best


def _within_memory(
    segments: SegmentPlan,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    memory_tokens: int,
    activation_tokens: int | None = None,
) -> tuple[StepChoice | None, float, int]:
    """The first attempt that fits on all stages, or None with the fewest missing bytes and their stage."""
    if shape.memory is None:
        kept = choose_kept_segments(segments, activation_tokens, shape.num_stages)
        passes = plan_passes(segments, segment_counts(segments, loss_masks)[2], kept, shape)
        return StepChoice(segments, kept, memory_tokens, passes[0].timeline.makespan, passes), 0.0, 0
    missing, stage = np.inf, 0
    for attempt in _attempts(segments, loss_masks, shape, memory_tokens):
        over = [peak - shape.memory.available(rank) for rank, peak in enumerate(attempt.peak_bytes)]
        if max(over) <= 0:
            return attempt, 0.0, 0
        if max(over) < missing:
            missing, stage = max(over), int(np.argmax(over))
    return None, missing, stage


def _attempts(
    segments: SegmentPlan, loss_masks: Sequence[np.ndarray] | None, shape: PipelineShape, memory_tokens: int
) -> Iterator[StepChoice]:
    """Pipeline plans that keep fewer and fewer activations; the last one holds only one path in flight."""
    path, edges = segments.peak_in_flight_tokens, segment_counts(segments, loss_masks)[2]
    runs = SegmentRuns.of(segments) if shape.memory.has_states else None
    forks = None if runs is None else [runs.counts]
    for share, limit in shares_and_limits(path, shape):
        kept = choose_kept_segments(segments, None if share == 1 else int(share * path), shape.num_stages)
        least = [_least_bytes(segments, runs, kept, shape, stage) for stage in range(shape.num_stages)]
        if max(least[stage] - shape.memory.available(stage) for stage in range(shape.num_stages)) > 0:
            yield StepChoice(segments, kept, memory_tokens, np.inf, None, tuple(least))
            continue
        passes = plan_passes(segments, edges, kept, replace(shape, max_in_flight_tokens=limit))
        peaks = [stage_peak_bytes(segments, passes[0], shape, stage, forks) for stage in range(shape.num_stages)]
        yield StepChoice(segments, kept, memory_tokens, passes[0].timeline.makespan, passes, tuple(peaks))


def shares_and_limits(path: int, shape: PipelineShape) -> list[tuple[float, int | None]]:
    """Shares of the activations to keep, and limits of the tokens in flight, to try one after the other.

    Args:
        path: tokens of the longest root path.
    """
    attempts = [(share, shape.max_in_flight_tokens) for share in KEPT_SHARES]
    if shape.max_in_flight_tokens is None or shape.max_in_flight_tokens > path:
        attempts.append((0.0, path))
    return attempts


def _least_bytes(
    segments: SegmentPlan, runs: SegmentRuns | None, kept: np.ndarray, shape: PipelineShape, stage: int
) -> float:
    """Lower bound on a stage's bytes for any schedule: the heaviest root path, in the backward of its last segment."""
    lengths, parents = segments.lengths.tolist(), segments.segment_parent.tolist()
    fixed = pools = peak = 0.0
    for virtual_stage in range(stage, len(shape.layers), shape.num_stages):
        layers, (sizes, of_states) = shape.layers[virtual_stage], shape.memory.stages[virtual_stage]
        fixed = max(fixed, sizes.fixed)
        pools += segments.peak_in_flight_tokens * sizes.slot(layers)
        held = sizes.kept(layers) * segments.lengths
        if of_states is not None:
            states = StepStates.of([runs.counts], of_states, int(runs.forks_in_flight.max(initial=0)))
            pools, held = pools + states.in_flight, held + states.kept
        above = [0.0] * segments.num_segments
        for segment, parent in enumerate(parents):
            if parent >= 0:
                above[segment] = above[parent] + held[parent] * kept[parent]
            work = float(sizes.work(lengths[segment], lengths[segment]))
            peak = max(peak, above[segment] + held[segment] + work)
    return fixed + pools + peak


def choose_kept_on_stages(
    segments: SegmentPlan, loss_masks: Sequence[np.ndarray] | None, shape: PipelineShape
) -> StepChoice:
    """Choose the kept activations of given segments, for example of packs, within the memory of every stage."""
    choice, missing, stage = _within_memory(segments, loss_masks, shape, 0)
    if choice is None:
        raise out_of_memory_error(shape.memory, stage, missing, segments.tree, segments.segment_tokens, None)
    return choice
