"""The planner's choice by costs and memory, against all choices on small cases and within its budget."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from common.planning.plan_accuracy import predicted_seconds
from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.memory_budget import GIB, ChunkTensors, MemoryBudget, StageBytes, peak_bytes
from megatron_dta.core.planning.costs.model import CostModel, segment_counts
from megatron_dta.core.planning.costs.segment_bytes import SegmentBytes
from megatron_dta.core.planning.pipeline import choice as pipeline_choice
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.plan import OpKind, SegmentPlan, depth_first_schedule, plan_segments
from megatron_dta.core.planning.segments.recompute import choose_kept_by_memory
from megatron_dta.core.planning.step import search as step_search
from megatron_dta.core.planning.step.evaluate import evaluate_plan
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget, stage_peak_bytes
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.planning.step.search import choose_step
from megatron_dta.core.tree import build_prefix_tree
from pipeline_cases import random_segments
from segment_planner_cases import random_sequences

EACH = SegmentBytes(7.0, 5.0, 3.0, 2.0, 11.0, 1.5, 400.0)
COSTS = CostModel(1.0, 0.02, 0.6, 9.0, 32)
LAYERS = 6


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_search, "SIZES", (64, 32, 16, 8, 4))
    monkeypatch.setattr(pipeline_choice, "PIPELINE_SIZES", (32, 16, 8))


def shape_of(available: float | None, stages: int = 1, chunks: int = 1, **settings: object) -> PipelineShape:
    """A pipeline with ``available`` bytes for a step beside one GiB of weights."""
    layers = (LAYERS // (stages * chunks),) * (stages * chunks)
    memory = None
    if available is not None:
        memory = MemoryBudget(1 + available / GIB, (GIB,) * stages, (StageBytes(EACH),) * len(layers))
    return PipelineShape(stages, chunks, layers, COSTS, memory=memory, is_measured=True, **settings)


def random_samples(rng: np.random.Generator, count: int, longest: int) -> list[TrainingSample]:
    samples = []
    for sequence in random_sequences(rng, count, 3, longest):
        if len(sequence) > 1:
            mask = rng.random(len(sequence)) < 0.5
            mask[0], mask[-1] = False, True
            samples.append(TrainingSample(sequence, mask))
    return samples or [TrainingSample(np.asarray([1, 2], np.int32), np.asarray([False, True]))]


def slow_peak(plan: SegmentPlan, kept: np.ndarray) -> float:
    """Bytes while each op of a depth-first walk runs, from the segments that are in flight then."""
    peak, alive, parents = 0.0, [], plan.segment_parent.tolist()
    for kind, segment in depth_first_schedule(plan):
        if kind is OpKind.FORWARD:
            alive.append(segment)
        path, node = 0, segment
        while node >= 0:
            path, node = path + int(plan.lengths[node]), parents[node]
        held = sum(
            (LAYERS * 7 + 5) * int(plan.lengths[s])
            for s in alive
            if kept[s] or (s == segment and kind is OpKind.BACKWARD)
        )
        peak = max(peak, held + max(11 * int(plan.lengths[segment]), 400) + 1.5 * path)
        if kind is OpKind.BACKWARD:
            alive.remove(segment)
    return plan.peak_in_flight_tokens * LAYERS * 3 + peak


def slow_counts(plan: SegmentPlan, masks: list[np.ndarray] | None) -> list[tuple[int, int, int]]:
    """Tokens, pairs and trained edges of each segment, token by token."""
    tree, trained = plan.tree, set()
    stream, offsets = tree.stream_indices_of(np.arange(len(tree.sequence_lengths)))
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        path = stream[begin:end]
        mask = np.arange(len(path)) > 0 if masks is None else masks[number]
        trained |= {(int(path[i - 1]), int(path[i])) for i in np.flatnonzero(mask)}
    counts = []
    for begin, end in itertools.pairwise(plan.segment_start.tolist()):
        pairs = sum(int(tree.position[i]) + 1 for i in range(begin, end))
        counts.append((end - begin, pairs, sum(begin <= parent < end for parent, _ in trained)))
    return counts


@pytest.mark.parametrize("seed", range(12))
def test_counts_of_segments_token_by_token(seed: int) -> None:
    rng = seed_all(seed)
    sequences = random_sequences(rng, int(rng.integers(0, 14)), 3, 40)
    tree = build_prefix_tree([sequence for sequence in sequences if len(sequence)])
    budget = int(tree.sequence_lengths.max(initial=0)) + int(rng.integers(0, 9))
    plan = plan_segments(tree, int(rng.integers(1, 20)), budget)
    masks = [rng.random(n) < rng.choice([0.0, 0.3, 1.0]) for n in tree.sequence_lengths.tolist()]
    for mask in masks:
        mask[0] = False
    for loss_masks in (masks, None):
        counts = zip(*(column.tolist() for column in segment_counts(plan, loss_masks)), strict=True)
        assert list(counts) == slow_counts(plan, loss_masks)


@pytest.mark.parametrize("seed", range(8))
def test_bytes_of_a_walk(seed: int) -> None:
    rng = seed_all(seed)
    plan = random_segments(rng, int(rng.integers(1, 30)))
    kept = rng.random(plan.num_segments) < 0.5
    ops = [(kind, segment, 0) for kind, segment in depth_first_schedule(plan)]
    first, later = (
        ChunkTensors(kept, plan.peak_in_flight_tokens, LAYERS, has_input, EACH) for has_input in (False, True)
    )
    arguments = ops, plan.lengths, plan.in_flight_tokens
    assert peak_bytes(*arguments, [first]) == pytest.approx(slow_peak(plan, kept))
    assert peak_bytes(*arguments, [later]) >= slow_peak(plan, kept)


@pytest.mark.parametrize("seed", range(12))
def test_kept_by_memory_against_all_choices(seed: int) -> None:
    rng = seed_all(seed)
    plan = random_segments(rng, int(rng.integers(1, 9)))
    seconds = rng.uniform(0.1, 5, plan.num_segments)
    needed = plan.lengths + rng.integers(0, 6, plan.num_segments)
    parents = plan.segment_parent.tolist()

    def largest(kept: tuple[bool, ...]) -> int:
        """Most of what a segment needs with what is kept above it."""
        above = [0] * plan.num_segments
        for segment, parent in enumerate(parents):
            if parent >= 0:
                above[segment] = above[parent] + int(plan.lengths[parent]) * kept[parent]
        return max(a + int(n) for a, n in zip(above, needed, strict=True))

    choices = list(itertools.product([False, True], repeat=plan.num_segments))
    for budget in range(int(needed.max()), int(needed.max()) + plan.peak_in_flight_tokens + 2):
        best = max(seconds[list(kept)].sum() for kept in choices if largest(kept) <= budget)
        chosen = choose_kept_by_memory(plan, budget, needed, seconds)
        assert largest(tuple(chosen.tolist())) <= budget
        assert seconds[chosen].sum() == pytest.approx(best)
        leaves = ~np.isin(np.arange(plan.num_segments), parents)
        assert chosen[leaves].all(), "a leaf is kept for nothing"
    assert chosen.all()
    with pytest.raises(ValueError, match="needs"):
        choose_kept_by_memory(plan, int(needed.max()) - 1, needed, seconds)


@pytest.mark.parametrize("seed", range(8))
def test_the_budget_is_never_exceeded(seed: int) -> None:
    rng = seed_all(seed)
    stages = (1, 1, 2, 3)[seed % 4]
    samples = random_samples(rng, int(rng.integers(1, 12)), 40 if stages == 1 else 15)
    chunks = 2 if stages == 3 and rng.random() < 0.5 else 1
    planned = 0
    for available in (400, 1500, 2500, 4000, 6000, 40_000):
        shape = shape_of(float(available), stages, chunks)
        try:
            step = plan_step(samples, ("dta", "dense")[seed % 2], pipeline=shape)
        except InputError:
            assert available < 40_000
            continue
        peaks = [stage_peak_bytes(step.segments, step.training, shape, stage) for stage in range(stages)]
        assert max(peaks) <= available
        planned += 1
    assert planned


@pytest.mark.parametrize("seed", range(4))
def test_what_a_refusal_asks_for_suffices(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seed_all(seed)
    samples = random_samples(rng, 12, 40)
    # Bytes large enough that two digits of GiB tell budgets apart.
    sizes = SegmentBytes(*(GIB * value / 400 for value in (7.0, 5.0, 3.0, 2.0, 11.0, 1.5, 400.0)))
    shape = replace(shape_of(None), memory=MemoryBudget(3.0, (2 * GIB,), (StageBytes(sizes),)))
    with pytest.raises(InputError, match=r"--tree-memory-gib 3 is .* GiB too small") as caught:
        plan_step(samples, "dta", pipeline=shape)
    least = float(re.search(r"set it to ([0-9.]+) or more", str(caught.value))[1])
    enough = replace(shape, memory=replace(shape.memory, gib=least))
    plan_step(samples, "dta", pipeline=enough)
    with pytest.raises(InputError):
        plan_step(samples, "dta", pipeline=replace(shape, memory=replace(shape.memory, gib=least - 0.02)))


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_against_all_sizes_and_budgets(seed: int) -> None:
    rng = seed_all(seed)
    samples = random_samples(rng, int(rng.integers(4, 14)), 50)
    tree, masks = build_prefix_tree([s.token_ids for s in samples]), [s.loss_mask for s in samples]
    longest = max(len(s.token_ids) for s in samples)
    for available in (3000, 6000, 30_000):
        shape, best = shape_of(float(available)), np.inf
        for size in step_search.SIZES:
            for budget in range(longest, max(3 * longest // 2, 4 * size) + 1, 9):
                choice, _, missing = evaluate_plan(plan_segments(tree, size, budget), masks, shape, budget)
                assert (choice is None) == (missing > 0)
                best = min(best, np.inf if choice is None else choice.seconds)
        if np.isfinite(best):
            chosen = choose_step(tree, masks, shape, StepBudget())
            assert chosen.seconds <= 1.06 * best
            assert chosen.peak_bytes[0] <= available
        else:
            with pytest.raises(InputError, match="GiB too small"):
                choose_step(tree, masks, shape, StepBudget())


def test_without_a_limit_in_bytes_the_fastest_size_is_taken() -> None:
    samples = random_samples(seed_all(3), 30, 50)
    free = plan_step(samples, "dta", pipeline=shape_of(None))
    assert free.segments.segment_tokens == 64
    assert free.training.kept.all()
    told = plan_step(samples, "dta", StepBudget(8), pipeline=shape_of(None))
    assert told.segments.segment_tokens == 8
    assert predicted_seconds(free, shape_of(None)) < predicted_seconds(told, shape_of(None))
    # Context ranks divide segments that are longer by their number.
    assert plan_step(samples, "dta", pipeline=shape_of(None, context_size=3)).segments.segment_tokens == 3 * 64
    launching = replace(shape_of(None), cost_model=replace(COSTS, floor_seconds=1e4))
    assert plan_step(samples, "dta", pipeline=launching).segments.num_segments == 1
    # Nothing is known of costs: the usual size.
    usual = plan_step(samples, "dta", pipeline=replace(shape_of(None), is_measured=False))
    assert usual.segments.segment_tokens == 2048
    assert usual.segments.num_segments == -(-usual.segments.tree.num_tokens // 2048)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("activation_tokens", [0, 12])
def test_no_forward_runs_again_right_after_itself(stages: int, chunks: int, activation_tokens: int) -> None:
    at_once = recomputed = 0
    for seed in range(4):
        samples = random_samples(seed_all(seed), 12, 40)
        shape = shape_of(None, stages, chunks)
        step = plan_step(samples, "dta", StepBudget(8, None, activation_tokens), shape)
        schedule, kept = step.training.schedule, step.training.kept
        budgeted = replace(shape, memory=MemoryBudget(2.0, (GIB,) * stages, (StageBytes(EACH),) * (stages * chunks)))
        less = replace(step.training, kept=np.zeros_like(kept))
        for stage, ops in enumerate(schedule.ops):
            for op, then in itertools.pairwise(ops):
                if op.kind is OpKind.FORWARD and then == (OpKind.BACKWARD, op.segment, op.chunk):
                    at_once += 1
                    assert kept[schedule.virtual_stage(stage, op.chunk), op.segment]
            if activation_tokens == 0:  # What is kept costs no memory.
                peaks = [stage_peak_bytes(step.segments, plan, budgeted, stage) for plan in (step.training, less)]
                assert peaks[0] <= peaks[1]
        recomputed += np.count_nonzero(~kept)
        inner = np.isin(np.arange(step.segments.num_segments), step.segments.segment_parent)
        if stages == 1:
            assert kept[0, ~inner].all()
        elif activation_tokens == 0:
            assert not kept[:, inner].any()
            assert not kept[0].all()
    assert at_once > 5
    assert recomputed > 20
