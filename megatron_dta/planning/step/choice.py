"""Chooses what of a step is free: the size of segments, how many tokens are in flight, which segments run twice.

None of it changes the result, so the choice is by predicted seconds, within the memory that a rank may use. With
segments of S tokens in a budget of M tokens in flight:

    larger S     fewer launches, and weights are read less often; but a segment's own activations are always there
    larger M     fuller segments; but K and V of more tokens, and more activations that are kept at once
    recompute    the seconds of a second forward, chosen segment by segment (``recompute``), where memory is short

On a single stage pairs of S and M are searched (``step_search``). For a pipeline the candidates are judged by their
schedules, and memory by what every stage holds at once as scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from megatron_dta.planning.costs.segment_counts import segment_counts
from megatron_dta.planning.pipeline.segments import plan_pipeline_segments, tokens_of_floor
from megatron_dta.planning.segments.cut import default_memory_tokens
from megatron_dta.planning.segments.plan import SegmentPlan
from megatron_dta.planning.segments.recompute import choose_kept_segments
from megatron_dta.planning.step.evaluate import StepChoice, judge, out_of_memory_error, with_peak
from megatron_dta.planning.step.passes import PipelineShape, plan_passes, stage_peak_bytes
from megatron_dta.planning.step.search import StepSearch
from megatron_dta.tree import PrefixTree

# Sizes that are tried where none is given, and the one that is taken where nothing is known of costs.
SIZES = (8192, 6656, 5376, 4352, 3584, 2816, 2048, 1536, 1024, 768, 512, 256)
PIPELINE_SIZES = (4096, 2048, 1024, 512)
DEFAULT_SEGMENT_TOKENS = 2048
# In a pipeline: parts of the tokens in flight whose activations are kept, tried in turn.
KEPT_SHARES = (1.0, 0.7, 0.4, 0.0)


def choose_step(
    tree: PrefixTree,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    segment_tokens: int | None = None,
    memory_tokens: int | None = None,
    activation_tokens: int | None = None,
) -> StepChoice:
    """The fastest step over ``tree``; deterministic, so that all ranks of a replica choose the same.

    Args:
        loss_masks: see ``segment_counts``.
        shape: stages, cost model and memory; only shapes with a memory budget are limited in bytes.
        segment_tokens, memory_tokens: not to be chosen, if given.
        activation_tokens: budget in tokens, in place of a memory budget.

    Raises:
        InputError: nothing fits into the memory, by how much; or as ``plan_segments``.
    """
    if shape.num_stages > 1:
        return _for_pipeline(tree, loss_masks, shape, segment_tokens, memory_tokens, activation_tokens)
    sizes = [segment_tokens] if segment_tokens else list(_useful_sizes(SIZES, tree.num_tokens))
    search = StepSearch(tree, loss_masks, shape, memory_tokens, activation_tokens, segment_tokens is None)
    return search.choose(sizes)


def _useful_sizes(sizes: Sequence[int], num_tokens: int) -> Iterator[int]:
    """Of those that hold all tokens in one segment only the least."""
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        if smaller < num_tokens or not smaller:
            yield size


def _for_pipeline(
    tree: PrefixTree,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    segment_tokens: int | None,
    memory_tokens: int | None,
    activation_tokens: int | None,
) -> StepChoice:
    """``choose_step`` for several stages."""
    stages, longest = shape.num_stages, int(tree.sequence_lengths.max(initial=0))
    candidates = []
    for size in [segment_tokens] if segment_tokens else _useful_sizes(PIPELINE_SIZES, tree.num_tokens):
        budgets = [memory_tokens]
        if memory_tokens is None and shape.memory is not None:
            budgets.append(longest)
        # Segments as long as their launches take, and shorter ones, which need less memory.
        for budget, floor in product(budgets, (0, tokens_of_floor(shape.cost_model))):
            segments = plan_pipeline_segments(tree, size, budget, stages, shape.max_in_flight_tokens, floor)
            forward, backward = shape.cost_model.segment_seconds(*segment_counts(segments, loss_masks))
            count = max(1, segments.num_segments)
            # Of equal segments; schedules of unequal ones come near to it.
            seconds = float((forward + backward).sum()) / stages * (count + stages - 1) / count
            candidates.append((seconds, -count, budget or default_memory_tokens(tree, size), segments))
    candidates.sort(key=lambda each: each[:2])
    if shape.memory is None:
        seconds, _, budget, segments = candidates[0]
        return StepChoice(segments, choose_kept_segments(segments, activation_tokens, stages), budget, seconds)
    best: StepChoice | None = None
    missing, stage = np.inf, 0
    for bound, _, budget, segments in candidates:
        if best is not None and best.seconds <= bound:
            continue
        found, short, rank = _within_memory(segments, loss_masks, shape, budget)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
        if short < missing:
            missing, stage = short, rank
    if best is None:
        raise out_of_memory_error(shape.memory, stage, missing, tree, candidates[-1][3].segment_tokens, memory_tokens)
    return best


def _within_memory(
    segments: SegmentPlan, loss_masks: Sequence[np.ndarray] | None, shape: PipelineShape, memory_tokens: int
) -> tuple[StepChoice | None, float, int]:
    """The first attempt that fits on all stages; else None, the bytes that are missing at least, and on which stage."""
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
    """Less and less kept in a pipeline, and at last no more in flight than a path."""
    path, edges = segments.peak_in_flight_tokens, segment_counts(segments, loss_masks)[2]
    tries = [(share, shape.max_in_flight_tokens) for share in KEPT_SHARES]
    if shape.max_in_flight_tokens is None or shape.max_in_flight_tokens > path:
        tries.append((0.0, path))
    for share, limit in tries:
        kept = choose_kept_segments(segments, None if share == 1 else int(share * path), shape.num_stages)
        least = [_least_bytes(segments, kept, shape, stage) for stage in range(shape.num_stages)]
        if max(least[stage] - shape.memory.available(stage) for stage in range(shape.num_stages)) > 0:
            yield StepChoice(segments, kept, memory_tokens, np.inf, None, tuple(least))
            continue
        passes = plan_passes(segments, edges, kept, replace(shape, max_in_flight_tokens=limit))
        peaks = [stage_peak_bytes(segments, passes[0], shape, stage) for stage in range(shape.num_stages)]
        yield StepChoice(segments, kept, memory_tokens, passes[0].timeline.makespan, passes, tuple(peaks))


def _least_bytes(segments: SegmentPlan, kept: np.ndarray, shape: PipelineShape, stage: int) -> float:
    """What a stage holds at least whatever the schedule: the heaviest root path, at its last backward."""
    each, own = shape.memory.bytes, shape.layers[stage :: shape.num_stages]
    unit = each.kept(max(own))
    above = [0.0] * segments.num_segments
    peak = 0.0
    lengths, parents = segments.lengths.tolist(), segments.segment_parent.tolist()
    for segment, parent in enumerate(parents):
        if parent >= 0:
            above[segment] = above[parent] + unit * lengths[parent] * kept[parent]
        work = float(each.work(lengths[segment], lengths[segment]))
        peak = max(peak, above[segment] + unit * lengths[segment] + work)
    return each.fixed + peak + segments.peak_in_flight_tokens * sum(each.slot(layers) for layers in own)


def choose_kept_of(
    segments: SegmentPlan,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    activation_tokens: int | None = None,
) -> StepChoice:
    """``choose_step`` where the segments are given, packs of whole trees for example."""
    if shape.memory is None:
        return StepChoice(segments, choose_kept_segments(segments, activation_tokens, shape.num_stages), 0, np.nan)
    if shape.num_stages == 1:
        choice, _, missing = judge(segments, loss_masks, shape, 0)
        stage = 0
        if choice is not None:
            choice = with_peak(choice, shape)
    else:
        choice, missing, stage = _within_memory(segments, loss_masks, shape, 0)
    if choice is None:
        raise out_of_memory_error(shape.memory, stage, missing, segments.tree, segments.segment_tokens, None)
    return choice
