"""Decoding of hybrid models on a GPU: kernels of one step against plain PyTorch, CUDA graphs against eager passes."""

from __future__ import annotations

import pytest
import torch

from dta_kernels.recurrence import reference
from dta_kernels.recurrence.decode_kernels import convolution_step, delta_step
from hybrid_cases import HYBRID, spread
from megatron_dta.sampling.in_process.cuda_graphs import why_not_captured
from rollout_forest import Drive, assert_same, run_forest, started
from sampling_cases import make_model

SHAPE = HYBRID | dict(num_query_groups=2, disable_bias_linear=True, kv_channels=16)


def test_steps_in_bfloat16_are_within_its_rounding():
    torch.manual_seed(3)
    H, J, K, W, C, n = 16, 32, 128, 4, 8192, 9
    slots, positions = torch.randperm(12, device="cuda")[:n], torch.full((n,), 7, device="cuda")
    states = torch.randn(12, J, K, K, device="cuda")
    rows, weight = (torch.randn(*size, device="cuda").bfloat16() for size in ((12, W - 1, C), (C, W)))
    before, kept = states.double(), rows.double()
    address = torch.tensor([states.data_ptr(), rows.data_ptr()], device="cuda")
    new = torch.randn(n, C, device="cuda").bfloat16()
    q, k = (torch.randn(n, H, K, device="cuda").bfloat16() for _ in range(2))
    v, g = torch.randn(n, J, K, device="cuda").bfloat16(), -torch.rand(n, J, device="cuda")
    inputs = q, k, v, g, torch.rand(n, J, device="cuda").bfloat16()
    found, out = convolution_step(new, weight, address, slots, positions), delta_step(inputs, address, slots, positions)
    for row, slot in enumerate(slots.tolist()):
        expected, last = reference.short_convolution_by_token(new[row : row + 1].double(), weight.double(), kept[slot])
        torch.testing.assert_close(found[row : row + 1].double(), expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(rows[slot].double(), last)
        own = [each[row : row + 1].double() for each in inputs]
        expected, state = reference.gated_delta_rule_by_token(*own, before[slot])
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(states[slot].double(), state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_samples_of_eager_passes(dtype: torch.dtype):
    """In bfloat16 they are compared with themselves: passes of several tokens round in other places."""
    model, drive = make_model(7, dtype, **SHAPE, gated_delta_rule_impl="reference"), Drive(seed=11)
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
