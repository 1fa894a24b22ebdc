"""The compiled tree attention kernels: the interpreter's checks at training sizes, and properties of GPUs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.tree_attention.config import KernelConfig, default_config
from tree_attention_cases import (
    SCALE,
    AttentionShape,
    Case,
    Segment,
    accumulators_for,
    big_segment,
    check_accumulation,
    check_sibling_changes_no_bit,
    compiled_variants,
    random_segment,
    relative_errors,
    segment_of,
)
from triton_device import DEVICE

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_random_forests(dtype, head_size, ratio):
    generator = seed_all(head_size + ratio)
    segment = big_segment(generator, int(generator.integers(900, 2500)))
    case = Case.random(segment, AttentionShape(2 * ratio, 2, head_size, dtype), DEVICE)
    errors = relative_errors(case.run(), case.expected(torch.float32 if dtype != torch.float32 else torch.float64))
    assert max(errors) < BOUNDS[dtype], errors


@pytest.mark.parametrize("stored_scores_bytes", [300_000, 4_000_000])
@pytest.mark.parametrize("tma", [False, True])
def test_every_way_through_the_backward_pass(stored_scores_bytes, tma):
    generator = seed_all(3)
    case = Case.random(big_segment(generator, 2111), AttentionShape(8, 2, 128, torch.bfloat16), DEVICE)
    table = default_config(128, torch.bfloat16, DEVICE, gluon=False)
    kernels = {name: replace(getattr(table, name), tma=tma) for name in ("forward", "key_gradients", "query_gradients")}
    config = replace(table, **kernels, stored_scores_bytes=stored_scores_bytes)
    errors = relative_errors(case.run(config), case.expected(torch.float32))
    assert max(errors) < BOUNDS[torch.bfloat16], errors
    check_accumulation(case, config, generator)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_the_hopper_kernels(head_size, keys, ratio):
    generator = seed_all(keys + ratio)
    table = default_config(head_size, torch.bfloat16, DEVICE, gluon=False)
    config = replace(
        table,
        forward=KernelConfig(128, keys, 4, 2, tma=True, hopper=True),
        key_gradients=KernelConfig(64, 128, 4, 2, tma=True, hopper=True),
        query_gradients=KernelConfig(128, 128, 4, 6, tma=True, hopper=True),
        stored_scores_bytes=int(generator.choice([1 << 20, 512 << 20])),
        least_tiles=int(generator.choice([1, 16])),
    )
    for size in (1, 40, 130, 900, 2500):
        shape = AttentionShape(2 * ratio, 2, head_size, torch.bfloat16)
        segment = big_segment(generator, size) if size > 200 else random_segment(generator, size)
        case = Case.random(segment, shape, DEVICE)
        first, again, expected = case.run(config), case.run(config), case.expected(torch.float32)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        for got, wanted in zip(first, expected, strict=True):
            assert float((got.float() - wanted).norm()) <= 1e-2 * max(1.0, float(wanted.norm()))
    check_accumulation(case, config, generator)


def test_bfloat16_is_as_near_to_float32_as_pytorchs_attention():
    """Masked and causal; the mean over cases of the ratio of the errors is not above 1 but by chance."""
    ratios = []
    for seed in range(8):
        generator = seed_all(seed)
        chain = np.arange(-1, 1023)
        segment = segment_of(chain, 0, 1024) if seed % 2 else big_segment(generator, 1400)
        case = Case.random(segment, AttentionShape(8, 8, 128, torch.bfloat16), DEVICE)
        query, key, end = segment.tensors(DEVICE)
        visible = (key <= query[:, None]) & (query[:, None] < end)
        q, k, v = (x.transpose(0, 1)[None].detach().requires_grad_() for x in (case.q, case.k, case.v))
        mask = None if seed % 2 else visible
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=SCALE)
        gradients = torch.autograd.grad(out, (q, k, v), case.grad_out.transpose(0, 1)[None])
        library = [x[0].transpose(0, 1) for x in (out.detach(), *gradients)]
        expected = case.expected(torch.float32)
        out, _, *ours = case.run()
        wanted = [expected[0], *expected[2:]]
        pairs = zip(relative_errors([out, *ours], wanted), relative_errors(library, wanted), strict=True)
        ratios += [mine / theirs for mine, theirs in pairs]
    print(f"error over PyTorch's: mean {np.mean(ratios):.4f}, {[round(r, 3) for r in ratios]}")
    assert np.mean(ratios) < 1.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sibling_changes_no_bit_and_a_repeat_none_either(dtype):
    generator = seed_all(31)
    shape = AttentionShape(8, 2, 128, dtype)
    for lengths in ((190, 131, 222, 171), (0, 517, 64, 300), (1000, 1, 1, 1)):
        check_sibling_changes_no_bit(generator, shape, lengths, None, DEVICE)
    case = Case.random(big_segment(generator, 1800), shape, DEVICE)
    first = case.run()
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(first, case.run(), strict=True))


def test_new_lengths_compile_nothing():
    generator = seed_all(41)
    shape = AttentionShape(4, 2, 64, torch.bfloat16)

    def run(segment: Segment) -> None:
        case = Case.random(segment, shape, DEVICE)
        case.run(into=accumulators_for(case, generator))

    run(big_segment(generator, 777))
    before = compiled_variants()
    assert before
    for size in (1, 2, 15, 16, 17, 128, 255, 256, 1024, 1500):
        run(random_segment(generator, size))
    run(big_segment(generator, 4000))
    assert compiled_variants() == before
