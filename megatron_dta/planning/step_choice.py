"""Chooses what of a step is free: the size of segments, how many tokens are in flight, which segments run twice.

None of it changes the result, so the choice is by predicted seconds, within the memory that a rank may use. With
segments of S tokens in a budget of M tokens in flight:

    larger S     fewer launches, and weights are read less often; but a segment's own activations are always there
    larger M     fuller segments; but K and V of more tokens, and more activations that are kept at once
    recompute    the seconds of a second forward, chosen segment by segment (``recompute``), where memory is short

Pairs of S and M are planned from the largest on, and the search ends where no smaller segments can be faster. For a
pipeline the candidates are judged by their schedules, and memory by what every stage holds at once as scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.errors import InputError
from megatron_dta.planning.pipeline_segments import plan_pipeline_segments
from megatron_dta.planning.recompute import choose_kept_by_memory, choose_kept_segments, least_activation_tokens
from megatron_dta.planning.segment_bytes import GIB, MemoryBudget
from megatron_dta.planning.segment_counts import segment_counts
from megatron_dta.planning.segment_plan import SegmentPlan
from megatron_dta.planning.segments import default_memory_tokens, plan_segments
from megatron_dta.planning.stage_program import PassPlan, PipelineShape, plan_passes, stage_peak_bytes
from megatron_dta.tree import PrefixTree

# Sizes that are tried where none is given, and the one that is taken where nothing is known of costs.
SIZES = (8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 256)
PIPELINE_SIZES = (4096, 2048, 1024, 512)
DEFAULT_SEGMENT_TOKENS = 2048
# Where memory is not limited in bytes, larger segments may have no more in flight than these by default.
UNLIMITED_SEGMENT_TOKENS = 2048
# After so many sizes that are slower than the best, smaller ones are not tried; each is looked at with so many of the
# segment planner's strategies, and the best planned with all. Some segment is at least so full.
SLOWER_SIZES = 2
LOOKED_AT = 2
FULL = 0.9
BETWEEN = (0.75, 0.5, 0.25, 0.125)
# In a pipeline: parts of the tokens in flight whose activations are kept, tried in turn.
KEPT_SHARES = (1.0, 0.7, 0.4, 0.0)


@dataclass(frozen=True)
class StepChoice:
    """What was chosen.

    Attributes:
        segments: the forest and its cut.
        kept: bool [num_segments], segments that keep their activations.
        memory_tokens: budget of tokens in flight that the segments were planned with; 0 for packs.
        seconds: predicted, of forward and backward on one replica.
        passes: training and forward-only pass where they had to be planned to choose, else None.
        peak_bytes: most bytes that each pipeline rank holds at once; None without a limit in bytes.
    """

    segments: SegmentPlan
    kept: np.ndarray
    memory_tokens: int
    seconds: float
    passes: tuple[PassPlan, PassPlan] | None = None
    peak_bytes: tuple[float, ...] | None = None


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
    best: StepChoice | None = None
    slower, work, overhead = 0, 0.0, shape.cost_model.seconds_per_segment
    for size in sizes:
        if slower >= SLOWER_SIZES or (best and best.seconds <= work + overhead * -(-tree.num_tokens // size)):
            break
        if size != sizes[-1] and _surely_too_large(tree, size, shape):
            continue
        of_size: list[float] = []
        for budget in _in_flight_budgets(tree, size, memory_tokens, segment_tokens is None, shape.memory is not None):
            segments = plan_segments(tree, size, budget, LOOKED_AT)
            choice, work, _ = judge(segments, loss_masks, shape, budget, activation_tokens)
            if choice is None:
                continue
            of_size.append(choice.seconds)
            best = choice if best is None or choice.seconds < best.seconds else best
            if choice.kept.all():
                break  # A smaller budget would only cut it worse.
        slower += bool(of_size) and min(of_size) > best.seconds
    return _settled(tree, loss_masks, shape, best, sizes[-1], memory_tokens, activation_tokens)


def _settled(
    tree: PrefixTree,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    found: StepChoice | None,
    least_size: int,
    memory_tokens: int | None,
    activation_tokens: int | None,
) -> StepChoice:
    """The choice of a search that took quick looks, planned with care; the least of all if it found nothing."""
    longest = int(tree.sequence_lengths.max(initial=0))
    size, budget = least_size, memory_tokens or longest
    if found is not None:
        size, budget = found.segments.segment_tokens, found.memory_tokens
        if shape.memory is not None and memory_tokens is None and budget == longest:
            # Something between the least and the usual budget may fit as well, and fill segments better.
            room = default_memory_tokens(tree, size) - longest
            for part in BETWEEN:
                quick = plan_segments(tree, size, longest + int(part * room), LOOKED_AT)
                choice, _, _ = judge(quick, loss_masks, shape, longest + int(part * room), activation_tokens)
                if choice is not None and choice.seconds < found.seconds:
                    found, budget = choice, choice.memory_tokens
    choice, _, missing = judge(plan_segments(tree, size, budget), loss_masks, shape, budget, activation_tokens)
    if choice is not None and (found is None or choice.seconds < found.seconds):
        found = choice
    if found is None:
        raise _too_little(shape.memory, 0, missing, tree, size, memory_tokens)
    return found


def _surely_too_large(tree: PrefixTree, size: int, shape: PipelineShape) -> bool:
    """Whether not even one full segment at the end of the longest sequence fits."""
    if shape.memory is None:
        return False
    layers, each = float(sum(shape.layers)), shape.memory.bytes
    tokens, path = FULL * min(size, tree.num_tokens), int(tree.sequence_lengths.max(initial=0))
    slots = path * layers * each.kv_per_token_and_layer
    return slots + each.kept(layers) * tokens + each.work(tokens, path) > shape.memory.available(0)


def judge(
    segments: SegmentPlan,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    memory_tokens: int,
    activation_tokens: int | None = None,
) -> tuple[StepChoice | None, float, float]:
    """Segments on a single stage with the best choice of what they keep.

    Returns:
        (the choice, None if it does not fit; seconds of the step without what each segment costs beside its tokens and
        without recomputation; bytes that are missing, 0 if it fits).
    """
    model, budget = shape.cost_model, shape.memory
    counts = segment_counts(segments, loss_masks)
    forward, backward = model.segment_seconds(*counts)
    seconds = float((forward + backward).sum())
    work = seconds - segments.num_segments * model.seconds_per_segment
    peak: tuple[float, ...] | None = None
    if budget is None:
        kept = choose_kept_segments(segments, activation_tokens)
    else:
        layers, each = float(sum(shape.layers)), budget.bytes
        slots = segments.peak_in_flight_tokens * layers * each.kv_per_token_and_layer
        unit = each.kept(layers)
        needed = np.ceil(segments.lengths + each.work(segments.lengths, segments.in_flight_tokens) / unit)
        needed = needed.astype(np.int64)
        left = int((budget.available(0) - slots) // unit)
        if least_activation_tokens(needed) > left:
            return None, work, slots + unit * least_activation_tokens(needed) - budget.available(0)
        kept = choose_kept_by_memory(segments, left, needed, forward)
        passes = plan_passes(segments, counts[2], ~kept, shape)
        peak = (stage_peak_bytes(segments, passes[0], kept, shape, 0),)
    seconds += float(forward[~kept].sum())
    return StepChoice(segments, kept, memory_tokens, seconds, None, peak), work, 0.0


def _useful_sizes(sizes: Sequence[int], num_tokens: int) -> Iterator[int]:
    """Of those that hold all tokens in one segment only the least."""
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        if smaller < num_tokens or not smaller:
            yield size


def _in_flight_budgets(
    tree: PrefixTree, size: int, memory_tokens: int | None, chooses_size: bool, is_limited: bool
) -> list[int]:
    """Budgets of tokens in flight to try with segments of ``size``, the largest first."""
    if memory_tokens is not None:
        return [memory_tokens]
    if not is_limited:
        return [default_memory_tokens(tree, min(size, UNLIMITED_SEGMENT_TOKENS) if chooses_size else size)]
    longest, default = int(tree.sequence_lengths.max(initial=0)), default_memory_tokens(tree, size)
    return sorted({default, longest}, reverse=True)


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
        for budget in budgets:
            segments = plan_pipeline_segments(tree, size, budget, stages, shape.max_in_flight_tokens)
            forward, backward = shape.cost_model.segment_seconds(*segment_counts(segments, loss_masks))
            count = max(1, segments.num_segments)
            # Of equal segments; schedules of unequal ones come near to it.
            seconds = float((forward + backward).sum()) / stages * (count + stages - 1) / count
            candidates.append((seconds, -count, budget or default_memory_tokens(tree, size), segments))
    candidates.sort(key=lambda each: each[:2])
    if shape.memory is None:
        seconds, _, budget, segments = candidates[0]
        return StepChoice(segments, choose_kept_segments(segments, activation_tokens), budget, seconds)
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
        raise _too_little(shape.memory, stage, missing, tree, candidates[-1][3].segment_tokens, memory_tokens)
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
        kept = choose_kept_segments(segments, None if share == 1 else int(share * path))
        least = [_least_bytes(segments, kept, shape, stage) for stage in range(shape.num_stages)]
        if max(least[stage] - shape.memory.available(stage) for stage in range(shape.num_stages)) > 0:
            yield StepChoice(segments, kept, memory_tokens, np.inf, None, tuple(least))
            continue
        passes = plan_passes(segments, edges, ~kept, replace(shape, max_in_flight_tokens=limit))
        peaks = [stage_peak_bytes(segments, passes[0], kept, shape, stage) for stage in range(shape.num_stages)]
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
        peak = max(peak, above[segment] + unit * lengths[segment] + each.work_per_token * lengths[segment])
    return peak + segments.peak_in_flight_tokens * sum(own) * each.kv_per_token_and_layer + each.work_fixed


def choose_kept_of(
    segments: SegmentPlan,
    loss_masks: Sequence[np.ndarray] | None,
    shape: PipelineShape,
    activation_tokens: int | None = None,
) -> StepChoice:
    """``choose_step`` where the segments are given, packs of whole trees for example."""
    if shape.memory is None:
        return StepChoice(segments, choose_kept_segments(segments, activation_tokens), 0, np.nan)
    if shape.num_stages == 1:
        choice, _, missing = judge(segments, loss_masks, shape, 0)
        stage = 0
    else:
        choice, missing, stage = _within_memory(segments, loss_masks, shape, 0)
    if choice is None:
        raise _too_little(shape.memory, stage, missing, segments.tree, segments.segment_tokens, None)
    return choice


def _too_little(
    memory: MemoryBudget,
    rank: int,
    missing: float,
    tree: PrefixTree,
    segment_tokens: int,
    memory_tokens: int | None,
) -> InputError:
    constant, needed = memory.constant[rank] / GIB, memory.gib + missing / GIB
    enough = math.ceil(100 * needed + 1e-6) / 100
    longest = int(tree.sequence_lengths.max(initial=0))
    in_flight = f"with {memory_tokens} tokens in flight" if memory_tokens else f"of sequences of {longest} tokens"
    where = f" on pipeline rank {rank}" if len(memory.constant) > 1 else ""
    return InputError(
        f"--tree-memory-gib {memory.gib:g}: too little by {missing / GIB:.2f} GiB{where}; weights, gradients and "
        f"optimizer states take {constant:.2f} GiB, and a step {in_flight} in segments of {segment_tokens} takes "
        f"{needed - constant:.2f} GiB at least, so give {enough:.2f} or more, or divide the model over "
        "more ranks"
    )
