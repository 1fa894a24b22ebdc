"""Layers of pipeline stages by the real times of their ops: against all divisions, and equally busy ranks."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.planning import CostModel, PipelineCosts
from megatron_dta.planning.pipeline.layers import balanced_shares, layers_per_stage
from megatron_dta.planning.pipeline.stage_balance import balance_layers, balance_shares
from pipeline_layers_cases import divisions


def random_work(rng: np.random.Generator, floor_tokens: float):
    """Times of virtual stages for segments whose logits partly hide in the floor of launches."""
    count = int(rng.integers(3, 40))
    tokens, edges = rng.integers(100, 2000, count), rng.integers(0, 1500, count)
    pairs = tokens * rng.integers(10, 3000, count)
    model = CostModel(1e-5, 1e-10, 10 ** rng.uniform(-7, -5.5), 1e-5 * floor_tokens)
    again = rng.random(count) < 0.3

    def work(layers) -> np.ndarray:
        return PipelineCosts.of_segments(model, tokens, pairs, edges, layers, again).work

    layers_cost = float(sum(map(np.sum, model.segment_seconds(tokens, pairs, np.zeros(count)))))
    return work, layers_cost, model.seconds_per_edge * float(edges.sum())


def busy(work, layers, stages: int) -> np.ndarray:
    return work(layers).reshape(-1, stages).sum(axis=0)


@pytest.mark.parametrize("floor_tokens", [0, 1000, 5000])
@pytest.mark.parametrize("seed", range(12))
def test_ranks_are_equally_busy(seed: int, floor_tokens: int) -> None:
    rng = seed_all(seed)
    stages, chunks = int(rng.integers(2, 9)), int(rng.integers(1, 3))
    work, layers_cost, output = random_work(rng, floor_tokens)
    counted = balanced_shares(stages, chunks, layers_cost, output_cost=output)
    found = balance_shares(work, counted, stages)
    assert sum(found) == pytest.approx(1, rel=1e-12)
    assert min(found) >= 0
    before, after = busy(work, counted, stages), busy(work, found, stages)
    assert after.max() <= before.max()
    if busy(work, found, stages)[-1] == after.max() and sum(found[stages - 1 :: stages]) < 1e-3:
        return  # Logits alone take longer than what is left for each of the others.
    np.testing.assert_allclose(after, after.mean(), rtol=1e-4)


def test_logits_that_hide_in_launches_cost_no_layers() -> None:
    """Counted, the last stage has fewer layers; timed, all have as many."""
    tokens = np.full(20, 100)
    model = CostModel(1e-5, 0.0, 1e-6, 1.0)

    def work(layers) -> np.ndarray:
        return PipelineCosts.of_segments(model, tokens, tokens * 0, tokens, layers).work

    counted = balanced_shares(4, 1, 20.0, output_cost=0.4)
    assert counted[3] < 0.24
    np.testing.assert_allclose(balance_shares(work, counted, 4), 0.25, rtol=1e-5)
    assert balance_layers(work, layers_per_stage(8, 4, 1.0, 0.0, 1.5), 4) == [2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_whole_layers_against_all_divisions(seed: int) -> None:
    rng = seed_all(seed)
    stages = int(rng.integers(2, 5))
    work, layers_cost, output = random_work(rng, float(rng.choice([0, 1000, 5000])))
    count = int(rng.integers(stages, 10))
    counted = layers_per_stage(count, stages, layers_cost / count, 0.0, output)
    found = balance_layers(work, counted, stages)
    assert sum(found) == count
    assert min(found) >= 1
    best = min(busy(work, each, stages).max() for each in divisions(count, stages, 1))
    assert busy(work, found, stages).max() == pytest.approx(best, rel=1e-9)


def test_nothing_to_do_keeps_the_division() -> None:
    assert balance_shares(lambda layers: np.zeros(4), [0.25] * 4, 4) == [0.25] * 4
    assert balance_layers(lambda layers: np.zeros(4), [3, 1, 1, 1], 4) == [3, 1, 1, 1]
