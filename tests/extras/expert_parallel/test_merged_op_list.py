"""A merged op list runs each rank's ops in a valid order, within its budget, in fewer ops than a merged tree."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.schedule import Op, OpKind, allocate_slots
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.expert_parallel.planning.merged_op_list import MergedOp, MergedOpList, build_merged_op_list
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import (
    CostedTree,
    MergedSegmentTree,
    SegmentForest,
    build_merged_segment_tree,
)
from megatron_dta.extras.expert_parallel.planning.synchronized_plan import RankPlan, synchronized_plan
from merged_segment_tree_cases import peak_of, random_forest


def plan_of(forest: SegmentForest) -> MergedSegmentTree:
    """A rank's tree as a plan of segments."""
    return MergedSegmentTree(
        np.asarray(forest.segment_parent, dtype=np.int32),
        np.arange(len(forest.lengths), dtype=np.int32)[None],
        np.asarray(forest.lengths, dtype=np.int64),
    )


def check_slots(forests: list[SegmentForest], op_list: MergedOpList, memory_tokens: int) -> None:
    budget = max([memory_tokens, *(peak_of(forest) for forest in forests)])
    trees = [CostedTree(forest) for forest in forests]
    cost = 0
    for number, op in enumerate(op_list.ops):
        # A backward right after the forward of the same segments uses its activations.
        at_once = op.is_backward and number > 0 and op_list.ops[number - 1] == MergedOp(False, op.segments)
        assert op.recomputes == (op.is_backward and not at_once)
        largest = max(
            (tree.costs[segment] for tree, segment in zip(trees, op.segments, strict=True) if segment >= 0), default=0
        )
        cost += largest * (1 + op.is_backward + op.recomputes)
    assert cost == op_list.cost
    for rank, forest in enumerate(forests):
        in_flight = empty = 0
        ops = []
        for op in op_list.ops:
            segment, sign = op.segments[rank], -1 if op.is_backward else 1
            if segment < 0:
                empty += sign
                assert empty >= 0
                continue
            ops.append(Op(OpKind.BACKWARD if op.is_backward else OpKind.FORWARD, segment))
            in_flight += sign * forest.lengths[segment]
            assert in_flight <= budget
        assert (in_flight, empty) == (0, 0)
        assert len(ops) == 2 * len(forest.lengths)
        allocate_slots(plan_of(forest), ops)  # refuses a wrong order


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_runs_its_own_tree_in_a_right_order(seed: int) -> None:
    generator = seed_all(seed)
    forests = [random_forest(generator, int(generator.integers(0, 25))) for _ in range(generator.integers(1, 6))]
    memory_tokens = int(generator.integers(0, 1500))
    op_list = build_merged_op_list(forests, memory_tokens)
    check_slots(forests, op_list, memory_tokens)
    sizes = [len(forest.lengths) for forest in forests]
    assert 2 * max(sizes) <= len(op_list.ops) <= 2 * sum(sizes) + 2
    assert build_merged_op_list(forests, memory_tokens) == op_list
    least = max(sum(CostedTree(forest).costs) for forest in forests)
    assert op_list.cost >= least * 3


def test_equal_trees_cost_nothing_more() -> None:
    forest = random_forest(seed_all(200), 40)
    costs = CostedTree(forest).costs
    inner = sum(costs[segment] for segment in set(forest.segment_parent) - {-1})
    assert build_merged_op_list([forest] * 4).cost == 3 * sum(costs) + inner  # only leaves run backward at once
    assert len(build_merged_op_list([forest] * 4).ops) == 80


def test_idle_ranks() -> None:
    forest, none = random_forest(seed_all(1), 9), SegmentForest([], [])
    op_list = build_merged_op_list([none, forest, none])
    assert len(op_list.ops) == 18
    check_slots([none, forest, none], op_list, 0)
    assert build_merged_op_list([none, none]).ops == []


def test_a_branch_need_not_wait_for_the_others_branches() -> None:
    """Two ranks with branches of other lengths, and equally many segments: a merged tree pairs only some of them."""
    long = SegmentForest([-1, 0, 1, 2, 3, 4, 0, 6, 7, 8, 9], [10] * 11)
    short = SegmentForest([-1, 0, 1, 2, 0, 4, 5, 0, 7, 8, 0], [10] * 11)
    for budget, slots, nodes in ((60, 28, 16), (80, 22, 15)):
        op_list = build_merged_op_list([long, short], budget)
        check_slots([long, short], op_list, budget)
        assert len(op_list.ops) <= slots < 2 * nodes
        assert build_merged_segment_tree([long, short], budget).num_segments >= nodes  # the reason for slots


def samples_of(generator: np.random.Generator, count: int) -> list[TrainingSample]:
    stem = generator.integers(0, 50, 30)
    samples = []
    for _ in range(count):
        tokens = np.concatenate(
            [stem[: generator.integers(1, 30)], generator.integers(0, 50, generator.integers(1, 60))]
        )
        samples.append(TrainingSample(tokens.astype(np.int32), np.arange(len(tokens)) > 0))
    return samples


@pytest.mark.parametrize("activation_tokens", [None, 0, 40, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_ranks_have_the_same_ops(seed: int, activation_tokens: int | None) -> None:
    generator = seed_all(seed)
    steps = [
        plan_step(samples_of(generator, count), budget=StepBudget(16, None, activation_tokens)) for count in (7, 1, 12)
    ]
    ranks = [RankPlan.of(step) for step in steps]
    plans = [synchronized_plan(step, ranks, number, PipelineShape()) for number, step in enumerate(steps)]
    ops = [plan.training.schedule.ops[0] for plan in plans]
    kinds = [[op.kind for op in of_rank] for of_rank in ops]
    assert kinds[0] == kinds[1] == kinds[2]
    # A backward that runs its forward again does so on all ranks.
    again = [
        [not plan.training.kept[0, op.segment] for op in of_rank if op.kind is OpKind.BACKWARD]
        for plan, of_rank in zip(plans, ops, strict=True)
    ]
    assert again[0] == again[1] == again[2]
    if activation_tokens == 0:
        # All of them but where all ranks ran the same segments' forwards right before.
        backwards = [at for at, kind in enumerate(kinds[0]) if kind is OpKind.BACKWARD]
        at_once = [
            all(of_rank[at] == (OpKind.BACKWARD, of_rank[at - 1].segment, 0) for of_rank in ops) for at in backwards
        ]
        assert again[0] == [not is_at_once for is_at_once in at_once]
        assert any(at_once)
        assert not all(at_once)
    tree = build_merged_segment_tree([rank.forest for rank in ranks], max(rank.memory_tokens for rank in ranks))
    assert len(ops[0]) <= 2 * tree.num_segments
    for step, plan, of_rank in zip(steps, plans, ops, strict=True):
        segments = plan.segments
        assert segments.num_segments == plan.training.kept.shape[1]
        assert sorted(op.segment for op in of_rank if op.kind is OpKind.FORWARD) == sorted(
            op.segment for op in of_rank if op.kind is OpKind.BACKWARD
        )
        used = {op.segment for op in of_rank}
        assert set(range(step.segments.num_segments)) <= used
        assert max(used) < segments.num_segments
        _, num_slots = allocate_slots(segments, [Op(op.kind, op.segment) for op in of_rank])
        budget = max([rank.memory_tokens for rank in ranks] + [peak_of(rank.forest) for rank in ranks])
        assert num_slots <= 2 * budget  # room is lost between segments of different lengths
