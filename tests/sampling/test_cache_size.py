"""How many pages the in-process engine's cache may have when no size is given."""

import pytest
import torch

from megatron_dta.sampling.in_process.cache_size import DeviceMemory, max_pages, pass_bytes
from megatron_dta.sampling.in_process.next_token import most_logit_bytes
from sampling_cases import make_model

GIB = 2**30
# 3 layers of 4 heads of 8 channels in float32.
PAGE_BYTES = 2 * 2 * 16 * 4 * 8 * 4


def test_what_is_free_becomes_pages_but_for_a_pass_and_a_margin():
    model = make_model(1, torch.float32)
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB)
    needed = pass_bytes(model, 4096, 1024)
    budget = (60 * GIB - needed - int(0.04 * 80 * GIB)) / (1 + 1 / 4)
    assert max_pages(model, 16, None, 4096, 1024, memory=memory) == int(budget) // PAGE_BYTES
    # On a small GPU the margin is a gibibyte.
    small = DeviceMemory(free=6 * GIB, total=8 * GIB)
    assert small.cache_bytes(0, 10**9) == pytest.approx(5 * GIB, rel=1e-6)


def test_a_given_size_counts_alone_and_a_cpu_has_no_limit():
    model = make_model(1, torch.float32)
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB)
    assert max_pages(model, 16, 0.5, 4096, 1024, memory=memory) == GIB // 2 // PAGE_BYTES
    assert max_pages(model, 16, None, 4096) is None
    assert max_pages(model, 16, None, 4096, memory=DeviceMemory(free=GIB // 2, total=8 * GIB)) == 0


def test_longer_passes_captured_ones_and_wider_layers_leave_less():
    model = make_model(1, torch.float32)
    assert pass_bytes(model, 4096) < pass_bytes(model, 8192)
    assert pass_bytes(model, 4096) < pass_bytes(model, 4096, 1024)
    wide, wider = (make_model(1, torch.float32, ffn_hidden_size=width) for width in (480, 960))
    assert pass_bytes(wider, 4096) - pass_bytes(wide, 4096) == 4096 * 4 * 3 * 480
    experts = make_model(1, torch.float32, num_experts=4, moe_router_topk=4, disable_bias_linear=True)
    assert pass_bytes(experts, 4096) > pass_bytes(model, 4096)


def test_logits_are_bounded():
    for rows in (1, 100, 10**6):
        assert most_logit_bytes(151_936, 2, 1, rows) <= 2**24 * 80
    assert most_logit_bytes(151_936, 2, 1, 0) == 0
    assert most_logit_bytes(151_936, 2, 2, 1) < most_logit_bytes(151_936, 2, 1, 2)
    assert most_logit_bytes(1000, 2, 1, 10) < 10 * 1000 * 80
