"""Decoding of hybrid models on a GPU: CUDA graphs against eager passes."""

import pytest
import torch

from hybrid_cases import HYBRID, NEMOTRON, spread
from megatron_dta.sampling.in_process.cuda_graphs import why_not_captured
from rollout_forest import Drive, assert_same, run_forest, started
from sampling_cases import make_model

SHAPE = dict(num_query_groups=2, disable_bias_linear=True, kv_channels=16)


@pytest.mark.parametrize("family", [HYBRID, NEMOTRON], ids=["delta", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_samples_of_eager_passes(dtype: torch.dtype, family: dict):
    """In bfloat16 they are compared with themselves: passes of several tokens round in other places."""
    model, drive = make_model(7, dtype, **family | SHAPE, recurrence_impl="reference"), Drive(seed=11)
    with torch.no_grad():
        spread(dict(model.named_parameters()), 7)
    assert why_not_captured(model) is None
    engine = started(model, static_passes=True)
    found = run_forest(engine, drive)
    statistics = engine.statistics()
    assert statistics["static_forwards"] > 0.5 * statistics["forwards"]
    assert_same(run_forest(started(model, static_passes=True), drive), found, 0)
    if dtype == torch.float32:
        assert_same(run_forest(started(model, attention_impl="reference"), drive), found, 2e-5)
