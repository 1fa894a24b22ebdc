"""The result of a step from those of its ranks: sums, means and maxima; a NaN of any rank is kept."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from conftest import seed_all
from megatron_dta.core.engine.executor import _result


def result_of(ranks: list[tuple[dict, dict]]) -> object:
    """The first rank's result, where each rank has found ``(metric_sums, maxima)``; 3 tokens counted on each."""
    sums, maxima = ({name: torch.tensor(value) for name, value in named.items()} for named in ranks[0])
    loss = SimpleNamespace(loss=torch.tensor(2.0), metric_sums=sums, maxima=maxima)
    run = SimpleNamespace(loss=loss, pools=[None], recomputed_tokens=4, peak_tokens=5)
    tree = SimpleNamespace(num_tokens=9)
    plan = SimpleNamespace(num_sequence_tokens=11, segments=SimpleNamespace(tree=tree, num_segments=2))

    def gather_over_stages(gathered: tuple) -> list[list[tuple]]:
        return [[gathered]] + [
            [(2.0, *sums_of_rank, gathered[3], 6 + rank)] for rank, sums_of_rank in enumerate(ranks[1:])
        ]

    mesh = SimpleNamespace(data_size=len(ranks), pipeline_size=1, gather_over_stages=gather_over_stages)
    return _result(run, SimpleNamespace(plan=plan, num_counted=3), mesh)


def test_a_maximum_is_nan_where_one_rank_has_found_nan() -> None:
    ranks = 3
    values = seed_all(ranks).uniform(1, 9, ranks)
    for wrong in range(ranks):
        with_nan = np.where(np.arange(ranks) == wrong, np.nan, values).tolist()
        result = result_of([({"a": 1.0}, {"top": value}) for value in with_nan])
        assert torch.isnan(result.metrics["top"])
