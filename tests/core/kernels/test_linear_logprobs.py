"""Chunked logprobs and entropies against whole logits and autograd."""

from __future__ import annotations

import pytest
import torch

from dta_kernels.logprobs.linear import linear_logprobs
from linear_logprobs_cases import chunks_of, random_case


@pytest.mark.parametrize(("seed", "chunk_rows", "temperature"), [(0, 1, 1.0), (1, 5, 0.6), (0, 23, 0.6), (1, 100, 1.0)])
def test_equals_log_softmax(seed, chunk_rows, temperature):
    hidden, weight, edge_row, target = random_case(seed, torch.float64)
    expected = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    expected_entropy = -(expected.exp() * expected).sum(-1)
    grad_logprobs = torch.randn(len(target), dtype=torch.float64)
    grad_entropy = torch.randn(len(hidden), dtype=torch.float64)
    outputs = (expected[edge_row, target], expected_entropy)
    wanted = torch.autograd.grad(outputs, (hidden, weight), (grad_logprobs, grad_entropy))

    logprobs, entropy = linear_logprobs(
        hidden, weight, edge_row, target, chunks_of(len(hidden), edge_row, chunk_rows), temperature
    )
    torch.testing.assert_close(logprobs, outputs[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(entropy, outputs[1], rtol=1e-12, atol=1e-13)
    gradients = torch.autograd.grad((logprobs, entropy), (hidden, weight), (grad_logprobs, grad_entropy))
    for actual, gradient in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("output", [0, 1])
def test_either_output_alone_has_its_gradient(output):
    hidden, weight, edge_row, target = random_case(3, torch.float64)
    chunks = chunks_of(len(hidden), edge_row, 4)
    torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, edge_row, target, chunks, 0.7)[output], (hidden, weight), atol=1e-6
    )


def test_large_logits_stay_finite():
    hidden, weight, edge_row, target = random_case(4, torch.float32)
    chunks = chunks_of(len(hidden), edge_row, 6)
    logprobs, entropy = linear_logprobs(hidden * 1e4, weight, edge_row, target, chunks)
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert all(torch.isfinite(x).all() for x in (logprobs, entropy, *gradients))


@pytest.mark.parametrize("fused", [False, True])
def test_float32_logits_are_not_rounded(fused):
    hidden, weight, edge_row, target = random_case(6, torch.bfloat16)
    chunks = chunks_of(len(hidden), edge_row, 9)
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    factors = torch.randn(len(target)), torch.randn(len(hidden))

    def run(inputs, **more):
        outputs = linear_logprobs(*inputs, edge_row, target, chunks, 0.7, **more)
        return outputs, torch.autograd.grad(outputs, inputs, factors)

    expected, wanted = run(wide, fused=False)
    outputs, gradients = run((hidden, weight), fused=fused, in_float32=True)
    rounded, _ = run((hidden, weight), fused=fused)
    for actual, exact, coarse in zip(outputs, expected, rounded, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=2e-6)
        assert (coarse - exact).abs().max() > 1e-3
    for actual, exact in zip(gradients, wanted, strict=True):
        # The gradient of the logits, and what follows, is rounded to bfloat16 as before.
        assert actual.dtype == torch.bfloat16
        assert (actual.float() - exact).norm() < 4e-3 * exact.norm()
