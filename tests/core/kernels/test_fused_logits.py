"""The logprob op on its Triton kernels against whole logits in float64, and against its plain twin.

On a CPU they run in Triton's interpreter, on a GPU compiled.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import os

from conftest import seed_all
from dta_kernels.logprobs import fused_logits
from dta_kernels.logprobs.linear import linear_logprobs
from linear_logprobs_cases import chunks_of
from tree_attention_cases import poisoned_memory
from triton_device import DEVICE

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
TEMPERATURE = 0.7


def random_case(seed: int, dtype: torch.dtype, rows: int = 13, vocabulary: int = 75, width: int = 9, spread: float = 3):
    generator = seed_all(seed)
    counts = torch.from_numpy(generator.integers(0, 5, size=rows))
    edge_row = torch.repeat_interleave(torch.arange(rows), counts)
    target = torch.cat([torch.randperm(vocabulary)[:count] for count in counts.tolist()])
    hidden = torch.randn(rows, width) * spread * torch.linspace(0.1, 2, rows)[:, None]
    tensors = hidden, torch.randn(vocabulary, width), torch.randn(len(target)), torch.randn(rows)
    hidden, weight, grad_logprobs, grad_entropy = (x.to(dtype).to(DEVICE) for x in tensors)
    return hidden, weight, edge_row.to(DEVICE), target.to(DEVICE), grad_logprobs.float(), grad_entropy.float()


def gradients_of(outputs, hidden, weight, upstream):
    chosen = [i for i, gradient in enumerate(upstream) if gradient is not None]
    return torch.autograd.grad(
        [outputs[i] for i in chosen], (hidden, weight), [upstream[i].to(outputs[i].dtype) for i in chosen]
    )


def run(case, which: str, chunk_rows: int, fused: bool):
    """Logprobs, entropies and gradients of the op."""
    hidden, weight, edge_row, target, grad_logprobs, grad_entropy = case
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    chunks = chunks_of(len(hidden), edge_row.cpu(), chunk_rows)
    upstream = {
        "both": (grad_logprobs, grad_entropy),
        "logprobs": (grad_logprobs, None),
        "entropy": (None, grad_entropy),
    }
    with poisoned_memory():
        outputs = linear_logprobs(hidden, weight, edge_row, target, chunks, TEMPERATURE, fused)
        return [x.detach() for x in outputs] + list(gradients_of(outputs, hidden, weight, upstream[which]))


def truth(case, which: str):
    hidden, weight, edge_row, target, grad_logprobs, grad_entropy = case
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logprobs = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, dim=-1)
    outputs = logprobs[edge_row, target], -(logprobs.exp() * logprobs).sum(-1)
    upstream = {
        "both": (grad_logprobs, grad_entropy),
        "logprobs": (grad_logprobs, None),
        "entropy": (None, grad_entropy),
    }
    return [x.detach() for x in outputs] + list(gradients_of(outputs, hidden, weight, upstream[which]))


@pytest.mark.parametrize(
    ("which", "block", "chunk_rows"),
    [("both", 16, 5), ("logprobs", 16, 100), ("entropy", 4096, 1), ("both", 4096, 100)],
)
def test_float32_equals_log_softmax(which, block, chunk_rows, monkeypatch):
    monkeypatch.setattr(fused_logits, "_BLOCK", block)
    case = random_case(chunk_rows + block, torch.float32)
    for actual, wanted in zip(run(case, which, chunk_rows, fused=True), truth(case, which), strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=2e-5, atol=2e-5)


def test_bfloat16_is_as_near_to_float64_as_the_plain_twin():
    which = "both"
    case = random_case(3, torch.bfloat16, spread=1)
    fused, plain, exact = run(case, which, 6, True), run(case, which, 6, False), truth(case, which)
    for actual, other, wanted in zip(fused, plain, exact, strict=True):
        assert actual.dtype == other.dtype
        errors = [float((x.double() - wanted).norm()) for x in (actual, other)]
        # The interpreter rounds to bfloat16 towards zero, twice the error of rounding to nearest.
        assert errors[0] <= (2.2 if DEVICE.type == "cpu" else 1.1) * errors[1] + 1e-6, errors


def test_large_logits_stay_finite_and_a_repeat_changes_no_bit():
    case = random_case(4, torch.float32, spread=1e4)
    results = [run(case, "both", 6, fused=True) for _ in range(2)]
    assert all(torch.isfinite(x).all() for x in results[0])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
