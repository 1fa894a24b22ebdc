"""Schedules of segments, the slots of their keys and values, and which of them keep their activations."""

import itertools

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.segments.plan import Op, OpKind, SegmentPlan, depth_first_schedule
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.planning.segments.slots import allocate_slots
from pipeline_cases import random_segments

F, B = OpKind.FORWARD, OpKind.BACKWARD


@pytest.mark.parametrize("seed", range(10))
def test_depth_first_schedule(seed: int) -> None:
    rng = seed_all(seed)
    plan = random_segments(rng, int(rng.integers(1, 25)))
    ops = depth_first_schedule(plan)
    assert [op.segment for op in ops if op.kind is F] == list(range(plan.num_segments))
    assert sorted(op.segment for op in ops if op.kind is B) == list(range(plan.num_segments))
    done: set[int] = set()
    for at, (kind, segment) in enumerate(ops):
        children = set(np.flatnonzero(plan.segment_parent == segment).tolist())
        if kind is F:
            assert plan.segment_parent[segment] not in done
            continue
        assert children <= done
        done.add(segment)
        # As soon as all children are done: right after the last child's backward, or its own forward if it has none.
        assert ops[at - 1] == (Op(B, max(children)) if children else Op(F, segment))
    start, num_slots = allocate_slots(plan, ops)
    assert num_slots == plan.peak_in_flight_tokens
    np.testing.assert_array_equal(start, plan.in_flight_tokens - plan.lengths)


def heaviest_path(plan: SegmentPlan, kept: np.ndarray) -> int:
    """Most kept tokens on a root path."""
    on_path = np.zeros(plan.num_segments, dtype=np.int64)
    for segment in range(plan.num_segments):
        parent = plan.segment_parent[segment]
        on_path[segment] = plan.lengths[segment] * kept[segment] + (on_path[parent] if parent >= 0 else 0)
    return int(on_path.max(initial=0))


def most_activations(plan: SegmentPlan, kept: np.ndarray) -> int:
    """Most tokens whose activations are there while a segment of a depth-first walk runs backward."""
    above = np.zeros(plan.num_segments, dtype=np.int64)
    for segment, parent in enumerate(plan.segment_parent):
        if parent >= 0:
            above[segment] = above[parent] + plan.lengths[parent] * kept[parent]
    return int((above + plan.lengths).max())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("longest", [1, 7])
def test_kept_segments_against_all_choices(seed: int, longest: int) -> None:
    rng = seed_all(seed)
    plan = random_segments(rng, int(rng.integers(1, 10)), longest)
    leaves = ~np.isin(np.arange(plan.num_segments), plan.segment_parent)
    choices = [np.asarray(kept) for kept in itertools.product([False, True], repeat=plan.num_segments)]
    paths = [heaviest_path(plan, kept) for kept in choices]
    for budget in range(plan.peak_in_flight_tokens + 2):
        best = max(int(plan.lengths[kept].sum()) for kept, path in zip(choices, paths, strict=True) if path <= budget)
        kept = choose_kept_segments(plan, budget, num_stages=2)
        assert kept.dtype == bool
        assert heaviest_path(plan, kept) <= budget
        assert plan.lengths[kept].sum() == best
        # On one stage leaves come on top, and take no more memory than their second forward would.
        alone = choose_kept_segments(plan, budget)
        np.testing.assert_array_equal(alone, kept | leaves)
        assert most_activations(plan, alone) == most_activations(plan, kept)
    assert choose_kept_segments(plan, None).all()
    np.testing.assert_array_equal(choose_kept_segments(plan, 0), leaves)
