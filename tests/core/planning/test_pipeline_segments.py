"""Segments for pipelines: their size by rule, and their counts; layers of stages against all divisions."""

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.pipeline.layers import layers_per_stage
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape

MODEL = CostModel.from_shape(DecoderShape(64, 5120, 25600, 64, 8, 128, 151936))


def forest(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Trajectories of several turns that share beginnings, some 40,000 tokens."""
    rng = seed_all(seed)
    sequences, masks = [], []
    for _ in range(8):
        trunk = rng.integers(0, 9999, rng.integers(300, 1500))
        for _ in range(6):
            tail = rng.integers(0, 9999, rng.integers(100, 2500))
            sequences.append(
                np.concatenate([trunk[: rng.integers(len(trunk) // 2, len(trunk))], tail]).astype(np.int32)
            )
            masks.append(np.arange(len(sequences[-1])) >= len(sequences[-1]) - len(tail))
    return sequences, masks


def busiest(step: StepPlan) -> float:
    """Share of the step in which the busiest stage computes."""
    return max(step.training.timeline.busy) / step.training.timeline.makespan


@pytest.mark.parametrize("stages", [4, 8])
def test_segments_are_shorter_where_stages_would_wait(stages: int) -> None:
    samples = [TrainingSample(*fields) for fields in zip(*forest(0), strict=True)]
    shape = PipelineShape(stages, layers=(64 // stages,) * stages, cost_model=MODEL)
    budgets = StepBudget(2048), StepBudget(), StepBudget()
    longest, free, again = (plan_step(samples, "dta", budget, shape) for budget in budgets)
    assert busiest(longest) < 0.95 < busiest(free)
    assert free.training.timeline.makespan < 0.985 * longest.training.timeline.makespan
    assert free.segments.segment_tokens < longest.segments.segment_tokens
    # Every rank plans for itself, and all have to make the same choice.
    assert free.training.schedule.digest() == again.training.schedule.digest()
    np.testing.assert_array_equal(free.segments.segment_start, again.segments.segment_start)


def divisions(layers: int, stages: int, least: int) -> list[list[int]]:
    if stages == 1:
        return [[layers]] if layers >= least else []
    return [
        [first, *rest] for first in range(least, layers + 1) for rest in divisions(layers - first, stages - 1, least)
    ]


def rank_costs(layers: list[int], ranks: int, layer: float, output: float) -> list[float]:
    costs = [layer * count for count in layers]
    costs[-1] += output
    return [sum(costs[rank::ranks]) for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(20))
def test_no_division_has_a_faster_slowest_rank(seed: int) -> None:
    rng = seed_all(seed)
    ranks, chunks = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    stages = ranks * chunks
    count = int(rng.integers(stages, 9 if stages < 5 else 8)) if stages < 8 else stages
    costs = float(rng.uniform(0.1, 2)), float(rng.uniform(0, 6))
    chosen = layers_per_stage(count, stages, *costs, num_stages=ranks)
    assert (len(chosen), sum(chosen)) == (stages, count)
    assert min(chosen) >= 1
    best = min(max(rank_costs(division, ranks, *costs)) for division in divisions(count, stages, 1))
    assert max(rank_costs(chosen, ranks, *costs)) == pytest.approx(best, rel=1e-12)
