"""FlashAttention 4 as tree attention on a Hopper GPU: against the reference in float32, and in training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.tree_attention.flash import launch as flash
from dta_kernels.tree_attention.flash.plan import VERSION, installed_version
from dta_kernels.tree_attention.layer_cache import SharedByLayers
from dta_kernels.tree_attention.plan import AttentionShape
from megatron_dta.engine import TreeEngine, prepare_batch
from megatron_dta.model import build_model, initialize_parallel
from megatron_dta.parity import compare_outcomes, random_training_samples, run_tree
from tree_attention_cases import (
    SCALE,
    FlashCase,
    big_segment,
    check_accumulation,
    poisoned_memory,
    random_segment,
    relative_errors,
    segment_of,
)
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of
from triton_device import DEVICE

pytestmark = [
    pytest.mark.skipif(
        DEVICE.type != "cuda" or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(installed_version() != VERSION, reason=f"needs flash-attn-4 {VERSION}"),
]
# Those of the Triton kernels.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 96, 128])
@pytest.mark.parametrize(("ratio", "groups"), [(2, 2), (4, 2), (8, 1), (3, 2)])
def test_random_forests(dtype, head_size, ratio, groups):
    generator = seed_all(head_size + ratio)
    segment = big_segment(generator, int(generator.integers(900, 2500)))
    case = FlashCase.random(segment, AttentionShape(groups * ratio, groups, head_size, dtype), DEVICE)
    errors = relative_errors(case.run(), case.expected(torch.float32))
    assert max(errors) < BOUNDS[dtype], errors
    check_accumulation(case, None, generator)


@pytest.mark.parametrize("size", [1, 2, 40, 63, 64, 65, 127, 128, 129, 300, 1025])
def test_lengths(size):
    generator, shape = seed_all(size), AttentionShape(8, 2, 128, torch.bfloat16)
    chain = np.arange(-1, 2 * size - 1)
    for segment in (random_segment(generator, size), segment_of(chain, 0, size), segment_of(chain, size, 2 * size)):
        case = FlashCase.random(segment, shape, DEVICE)
        for got, wanted in zip(case.run(), case.expected(torch.float32), strict=True):
            assert float((got.float() - wanted).norm()) <= 1e-2 * max(1.0, float(wanted.norm()))


def test_a_sibling_changes_neither_output_nor_statistics():
    """Gradients are added in no fixed order, so only the forward repeats bit for bit."""
    seed_all(31)
    trunk, first, shape = 131, 222, AttentionShape(8, 2, 128, torch.bfloat16)
    parent = np.arange(-1, 599)
    parent[trunk + first] = trunk - 1
    case = FlashCase.random(segment_of(parent, 0, 600), shape, DEVICE)
    others = torch.cat([torch.arange(trunk), torch.arange(trunk + first, 600)]).to(DEVICE)
    results = []
    for _ in range(2):
        results.append(case.run())
        for tensor in (case.q, case.k, case.v, case.grad_out):
            tensor[trunk : trunk + first] = torch.randn_like(tensor[trunk : trunk + first]) * 3
    (out, lse, *gradients), (out_2, lse_2, *gradients_2) = results
    assert torch.equal(out[others], out_2[others])
    assert torch.equal(lse[:, others], lse_2[:, others])
    own = torch.arange(trunk + first, 600, device=DEVICE)
    errors = relative_errors([x[own] for x in gradients], [x[own] for x in gradients_2])
    assert max(errors) < 1e-3, errors


def test_layers_share_buffers():
    """Other inputs on the same plan and cache give what they give alone."""
    generator, shape = seed_all(5), AttentionShape(8, 2, 128, torch.bfloat16)
    segment = big_segment(generator, 1500)
    cases = [FlashCase.random(segment, shape, DEVICE) for _ in range(3)]
    plan, key_end = cases[0].plan(None)
    shared, outputs = SharedByLayers(), []
    with poisoned_memory():
        for case in cases:
            inputs = (case.q, case.k, case.v)
            outputs.append(flash.tree_attention_forward(*inputs, key_end, plan, SCALE, shared))
        for case, (out, lse) in reversed(list(zip(cases, outputs, strict=True))):
            inputs = (case.grad_out, case.q, case.k, case.v, out, lse)
            found = flash.tree_attention_backward(*inputs, key_end, plan, SCALE, shared=shared)
            errors = relative_errors([out, lse, *found], case.expected(torch.float32))
            assert max(errors) < BOUNDS[torch.bfloat16], errors


def test_nothing_waits_for_the_device():
    case = FlashCase.random(big_segment(seed_all(51), 900), AttentionShape(8, 2, 128, torch.bfloat16), DEVICE)
    case.run()
    before = torch.cuda.get_sync_debug_mode()
    plan, key_end = case.plan(None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = flash.tree_attention_forward(case.q, case.k, case.v, key_end, plan, SCALE)
        flash.tree_attention_backward(case.grad_out, case.q, case.k, case.v, out, lse, key_end, plan, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode(before)


SHAPE = QWEN3 | dict(
    hidden_size=256, ffn_hidden_size=320, kv_channels=64, num_attention_heads=4, num_query_groups=2,
    max_position_embeddings=512,
)  # fmt: skip


def test_a_step_is_as_near_to_float32_as_on_the_triton_kernels():
    ratios = []
    for seed in range(29, 35):
        sequences = branching_sequences(seed_all(seed), count=12, longest=400)
        samples = random_training_samples(sequences, seed=seed)
        weights = weights_of(model_config(torch.bfloat16, **SHAPE), seed=seed)
        outcomes = {}
        for impl, dtype in (("reference", torch.float32), ("triton", torch.bfloat16), ("fa4", torch.bfloat16)):
            tree = tree_config("dta", 150, tree_attention_impl=impl)
            own = {name: weight.to(dtype) for name, weight in weights.items()}
            outcomes[impl], result = run_tree(model_config(dtype, **SHAPE), own, samples, GRPO, tree, TEMPERATURE)
            assert result.segments > 1
        rounded = [compare_outcomes(outcomes[impl], outcomes["reference"]) for impl in ("triton", "fa4")]
        ratios.append(
            [math.log(getattr(rounded[1], name) / getattr(rounded[0], name)) for name in ("logprob", "gradient")]
        )
    means = [math.exp(sum(column) / len(column)) for column in zip(*ratios, strict=True)]
    print("distance to float32 beside that of the Triton kernels, logprobs and gradients:", means)
    assert max(means) < 1.15, (means, ratios)


def test_a_step_does_not_wait_for_the_device():
    samples = random_training_samples(branching_sequences(seed_all(31), count=12, longest=300), seed=31)
    batch = prepare_batch(samples, tree_config("dta", 100))
    model = build_model(model_config(torch.bfloat16, **SHAPE), initialize_parallel(3))
    engine = TreeEngine(model, TEMPERATURE, 64, tree_attention_impl="fa4")
    assert engine.attention == "fa4"
    engine.forward_backward(batch, GRPO)
    engine.forward_backward(batch, GRPO, forbid_synchronization=True)
