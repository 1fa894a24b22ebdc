"""The pipeline's planner and simulation against slow twins, brute force, bounds and closed forms."""

import time

import numpy as np
import pytest

from common.planning.schedule_check import check_schedule
from conftest import seed_all
from megatron_dta.core.planning.pipeline.bounds import makespan_bound
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.list_schedule import longest_path_tokens
from megatron_dta.core.planning.pipeline.planner import plan_pipeline
from megatron_dta.core.planning.pipeline.schedule import peak_in_flight, tree_1f1b
from megatron_dta.core.planning.pipeline.simulation import simulate
from pipeline_cases import SHAPES, all_schedules, random_costs, random_tree, slow_times, uniform_costs


@pytest.mark.parametrize("seed", range(3))
def test_any_forest(seed: int) -> None:
    """Runs to its end, keeps all orders and the limit, is no faster than the bound; 10 forests each."""
    rng = seed_all(seed)
    for number in range(10):
        count, stages, chunks = int(rng.integers(0, 20)), int(rng.integers(1, 7)), int(rng.integers(1, 4))
        parents, lengths = random_tree(rng, count, SHAPES[number % len(SHAPES)]), rng.integers(1, 50, count)
        costs = random_costs(rng, stages * chunks, lengths)
        path = longest_path_tokens(parents.tolist(), lengths.tolist())
        limit = None if number % 3 == 0 else max(1, int(path * rng.choice([1.0, 1.3, 4.0])))
        send = float(rng.choice([0.0, 0.07]))
        schedule = plan_pipeline(parents, lengths, costs, stages, chunks, limit)
        check_schedule(schedule, parents)
        peak = max(peak_in_flight(schedule, lengths))
        if limit is not None:
            assert peak <= limit
        elif count:
            assert peak <= max(1.5 * path, max(peak_in_flight(tree_1f1b(parents, stages), lengths)))
        timeline = simulate(schedule, parents, costs, send)
        bound = makespan_bound(parents, lengths, costs, stages, chunks, limit)
        assert timeline.makespan >= bound * (1 - 1e-9)
        assert sum(timeline.busy) == pytest.approx(costs.work.sum(), rel=1e-9)
        assert schedule.digest() == plan_pipeline(parents, lengths, costs, stages, chunks, limit).digest()


@pytest.mark.parametrize("seed", range(4))
def test_simulation_against_its_slow_twin(seed: int) -> None:
    rng = seed_all(seed)
    for _ in range(4):
        count, stages, chunks = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
        parents, lengths = random_tree(rng, count), rng.integers(1, 50, count)
        costs = random_costs(rng, stages * chunks, lengths)
        send = float(rng.choice([0.0, 0.2]))
        schedule = plan_pipeline(parents, lengths, costs, stages, chunks)
        timeline, times = simulate(schedule, parents, costs, send), slow_times(schedule, parents, costs, send)
        for stage, ops in enumerate(schedule.ops):
            expected = np.asarray([times[stage, op] for op in ops])
            np.testing.assert_allclose(timeline.start[stage], expected[:, 0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(timeline.end[stage], expected[:, 1], rtol=1e-12, atol=1e-12)
        busy = [
            float(np.diff(np.asarray([times[stage, op] for op in ops])).sum()) for stage, ops in enumerate(schedule.ops)
        ]
        makespan = max(end for _, end in times.values())
        assert timeline.utilisation == pytest.approx(sum(busy) / (stages * makespan), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_against_all_schedules(seed: int) -> None:
    """On tiny pipelines nothing beats the plan by more than 2%, and the bound beats nothing."""
    rng = seed_all(seed)
    stages = 2 + seed % 2
    count = int(rng.integers(2, 6 if stages == 2 else 5))
    parents, lengths = random_tree(rng, count), rng.integers(1, 20, count)
    costs = random_costs(rng, stages, lengths)
    limit = int(longest_path_tokens(parents.tolist(), lengths.tolist()) * rng.choice([1.0, 1.5, 3.0]))
    best = np.inf
    for schedule in all_schedules(parents.tolist(), lengths.tolist(), stages, limit):
        try:
            best = min(best, simulate(schedule, parents, costs).makespan)
        except ValueError:
            continue
    planned = simulate(plan_pipeline(parents, lengths, costs, stages, 1, limit), parents, costs).makespan
    assert best * (1 - 1e-9) <= planned <= 1.02 * best
    assert makespan_bound(parents, lengths, costs, stages, 1, limit) <= best * (1 + 1e-9)


@pytest.mark.parametrize("shape", ["mixed", "roots", "star", "deep"])
def test_unequal_costs_beat_the_static_schedule(shape: str) -> None:
    """Lengths of 0.2 to 1: near the ideal within the static schedule's own in-flight tokens and half of P more."""
    rng = seed_all(7)
    static, planned = [], []
    for _ in range(2):
        parents, lengths = random_tree(rng, 120, shape), rng.integers(200, 1001, 120)
        costs = PipelineCosts(np.tile(lengths, (4, 1)).astype(float), np.tile(2 * lengths, (4, 1)).astype(float))
        schedule = tree_1f1b(parents, 4)
        limit = int(max(peak_in_flight(schedule, lengths))) + 2000
        static.append(simulate(schedule, parents, costs).utilisation)
        planned.append(simulate(plan_pipeline(parents, lengths, costs, 4, 1, limit), parents, costs).utilisation)
    ideal = 120 / 123
    print(f"{shape}: static {np.mean(static) / ideal:.3f}, planned {np.mean(planned) / ideal:.3f} of the ideal")
    assert min(planned) >= 0.97 * ideal
    assert np.mean(static) < 0.9 * ideal


def test_a_thousand_segments_on_eight_stages() -> None:
    rng = seed_all(0)
    parents, lengths = random_tree(rng, 1000, "deep"), rng.integers(200, 2049, 1000)
    costs = PipelineCosts(np.tile(lengths / 2048, (8, 1)), np.tile(lengths / 1024, (8, 1)))
    begin = time.process_time()
    schedule = plan_pipeline(parents, lengths, costs, 8)
    assert time.process_time() - begin < 20, "a second of an idle processor"
    check_schedule(schedule, parents)
    assert simulate(schedule, parents, costs).utilisation > 0.97


def test_bad_input() -> None:
    costs = uniform_costs(2, 2)
    with pytest.raises(ValueError, match=r"--pipeline-in-flight-tokens 6 is below the longest root path.*7 tokens"):
        plan_pipeline([-1, 0], [3, 4], costs, 2, 1, 6)
    with pytest.raises(ValueError, match="do not fit 2 stages of 2 chunks"):
        plan_pipeline([-1, 0], [3, 4], costs, 2, 2)
