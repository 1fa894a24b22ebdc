"""Layers of pipeline stages against all divisions."""

import pytest

from conftest import seed_all
from megatron_dta.core.planning.pipeline.layers import layers_per_stage


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
