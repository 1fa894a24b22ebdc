"""Schedules of pipelines: the static rule's closed form, forward-only ones, the check."""

import numpy as np
import pytest

from common.planning.schedule_check import check_schedule
from conftest import seed_all
from megatron_dta.core.planning.pipeline.planner import plan_pipeline
from megatron_dta.core.planning.pipeline.schedule import (
    PipelineOp,
    PipelineSchedule,
    backward_order,
    forward_only_pipeline,
    peak_in_flight,
    tree_1f1b,
    tree_depth,
)
from megatron_dta.core.planning.pipeline.simulation import simulate
from megatron_dta.core.planning.segments.plan import OpKind, depth_first_schedule
from pipeline_cases import SHAPES, random_segments, random_tree, uniform_costs

F, B = OpKind.FORWARD, OpKind.BACKWARD


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_static_schedule_has_the_closed_form(shape: str, seed: int) -> None:
    """Makespan (N + P - 1)(f + b) and min(N, D + P - 1 - s) segments in flight, on 60 forests each."""
    rng = seed_all(seed)
    for _ in range(60):
        count, stages = int(rng.integers(1, 30)), int(rng.integers(1, 9))
        parents = random_tree(rng, count, shape)
        forward, backward = rng.integers(1, 9, 2).tolist()
        schedule = tree_1f1b(parents, stages)
        check_schedule(schedule, parents)
        timeline = simulate(schedule, parents, uniform_costs(count, stages, forward, backward))
        assert timeline.makespan == (count + stages - 1) * (forward + backward)
        assert timeline.utilisation == pytest.approx(count / (count + stages - 1), rel=1e-12)
        depth = tree_depth(parents)
        in_flight = [min(count, depth + stages - 1 - stage) for stage in range(stages)]
        assert peak_in_flight(schedule, np.ones(count, dtype=int)) == in_flight


@pytest.mark.parametrize("seed", range(6))
def test_one_stage_is_the_depth_first_schedule(seed: int) -> None:
    rng = seed_all(seed)
    plan = random_segments(rng, int(rng.integers(1, 40)), longest=49)
    parents, lengths = plan.segment_parent, plan.lengths
    expected = [PipelineOp(*op) for op in depth_first_schedule(plan)]
    schedule = plan_pipeline(parents, lengths, uniform_costs(len(lengths), 1), 1, 1, plan.peak_in_flight_tokens)
    assert schedule.ops == [expected]
    assert backward_order(parents) == [op.segment for op in expected if op.kind is B]
    assert peak_in_flight(schedule, lengths) == [plan.peak_in_flight_tokens]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_forward_only(stages: int, chunks: int) -> None:
    """All stages are busy from their first op to their last where groups are full."""
    rng = seed_all(stages * 7 + chunks)
    for count in (0, 1, 3, stages * 3):
        parents = random_tree(rng, count)
        schedule = forward_only_pipeline(count, stages, chunks)
        check_schedule(schedule, parents)
        assert [len(ops) for ops in schedule.ops] == [count * chunks] * stages
        timeline = simulate(schedule, parents, uniform_costs(count, stages * chunks, 1.0, 1.0))
        if count % stages == 0 and count:
            assert timeline.makespan == count * chunks + stages - 1


def two_stages(first: str, second: str) -> PipelineSchedule:
    """A schedule from text: "F0 F1 B1" for each of two stages."""
    ops = [[PipelineOp(OpKind(name[0]), int(name[1:])) for name in text.split()] for text in (first, second)]
    return PipelineSchedule(2, 1, ops)


GOOD = "F0 F1 B1 B0"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("F0 F1 B1", GOOD, "B of segment 0 on stage 0 is missing"),
        (GOOD, "F0 F1 F1 B1 B0", "F of segment 1 on stage 1 is there twice"),
        (GOOD, "F0 F1 B1 B0 F2", "F of segment 2 on stage 1: there is no such segment"),
        (GOOD, "F1 F0 B1 B0", "F of segment 1 on stage 1 is where segment 0 is due"),
        ("F0 F1 B0 B1", "F0 F1 B0 B1", "B of segment 0 on stage [01] waits for B of segment 1 on stage [01]"),
        ("F0 B1 F1 B0", GOOD, "B of segment 1 on stage 0 waits for F of segment 1 on stage 0, which never runs"),
    ],
)
def test_schedules_that_cannot_run_are_refused(first: str, second: str, message: str) -> None:
    check_schedule(two_stages(GOOD, GOOD), [-1, 0])
    with pytest.raises(ValueError, match=message):
        check_schedule(two_stages(first, second), [-1, 0])
