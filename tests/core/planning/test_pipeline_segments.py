"""Segments for pipelines: their size by rule, and their counts."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_counts import segment_counts
from megatron_dta.core.planning.pipeline.segments import (
    ideal_utilisation,
    pipeline_segment_tokens,
)
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.cut import plan_segments
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.tree import build_prefix_tree
from partition_cases import turns_forest

MODEL = CostModel.from_shape(DecoderShape(64, 5120, 25600, 64, 8, 128, 151936))


def forest(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Trajectories of several turns that share beginnings, some 40,000 tokens."""
    rng = seed_all(seed)
    sequences, masks = [], []
    for _ in range(8):
        trunk = rng.integers(0, 9999, rng.integers(300, 1500))
        for _ in range(6):
            own = rng.integers(0, 9999, rng.integers(100, 2500))
            sequences.append(np.concatenate([trunk[: rng.integers(len(trunk) // 2, len(trunk))], own]).astype(np.int32))
            masks.append(np.arange(len(sequences[-1])) >= len(sequences[-1]) - len(own))
    return sequences, masks


@pytest.mark.parametrize("seed", range(8))
def test_counts_against_single_tokens(seed: int) -> None:
    rng = seed_all(seed)
    sequences, masks, _ = turns_forest(rng, 6, 3, 4)
    tree = build_prefix_tree(sequences)
    plan = plan_segments(tree, int(rng.integers(1, 40)))
    expected = np.zeros((3, plan.num_segments), dtype=np.int64)
    of_token = np.repeat(np.arange(plan.num_segments), plan.lengths)
    np.add.at(expected[0], of_token, 1)
    np.add.at(expected[1], of_token, plan.tree.position + 1)
    edges = set()
    for index, mask in enumerate(masks):
        stream = plan.tree.stream_indices(index)
        edges |= {(int(stream[t - 1]), int(stream[t])) for t in np.flatnonzero(mask)}
    for parent, _ in edges:
        expected[2, of_token[parent]] += 1
    np.testing.assert_array_equal(np.stack(segment_counts(plan, masks)), expected)


def test_sizes() -> None:
    assert pipeline_segment_tokens(10**6, 2048, 16384, 1) == 2048
    assert pipeline_segment_tokens(10**6, 2048, 16384, 4) == 1600
    assert pipeline_segment_tokens(10**6, 2048, 16384, 8) == 768
    assert pipeline_segment_tokens(10**6, 2048, 99999, 8) == 2048
    assert pipeline_segment_tokens(16000, 2048, 16384, 8) == 448
    assert pipeline_segment_tokens(10, 2048, 16384, 8) == 256
    assert pipeline_segment_tokens(100, 32, 256, 4) == 25
    assert pipeline_segment_tokens(100, 1, 1, 64) == 1
    # Not below what takes as long as its launches, if half of the budget holds the P - 1 more.
    assert pipeline_segment_tokens(10**6, 4096, 16384, 4, 700) == 1600
    assert pipeline_segment_tokens(10**6, 4096, 16384, 4, 2000) == 1984
    assert pipeline_segment_tokens(10**6, 4096, 16384, 4, 9999) == 2688
    assert pipeline_segment_tokens(10**6, 2048, 16384, 4, 9999) == 2048
    assert pipeline_segment_tokens(10, 2048, 16384, 8, 700) == 640
    assert pipeline_segment_tokens(10**6, 4096, 16384, 1, 700) == 4096
    assert (ideal_utilisation(9, 4), ideal_utilisation(0, 4)) == (0.75, 1.0)


def busiest(step: StepPlan) -> float:
    """Share of the step in which the busiest stage computes."""
    return max(step.training.timeline.busy) / step.training.timeline.makespan


@pytest.mark.parametrize("stages", [4, 8])
def test_segments_are_shorter_where_stages_would_wait(stages: int) -> None:
    samples = [TrainingSample(*each) for each in zip(*forest(0), strict=True)]
    shape = PipelineShape(stages, layers=(64 // stages,) * stages, cost_model=MODEL)
    budgets = StepBudget(2048), StepBudget(), StepBudget()
    longest, free, again = (plan_step(samples, "dta", budget, shape) for budget in budgets)
    assert busiest(longest) < 0.95 < busiest(free)
    assert free.training.timeline.makespan < 0.985 * longest.training.timeline.makespan
    assert free.segments.segment_tokens < longest.segments.segment_tokens
    # Every rank plans for itself, and all have to make the same choice.
    assert free.training.schedule.digest() == again.training.schedule.digest()
    np.testing.assert_array_equal(free.segments.segment_start, again.segments.segment_start)
