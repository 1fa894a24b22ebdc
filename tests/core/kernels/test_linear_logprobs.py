"""Chunked logprobs and entropies, plain and on the Triton kernels, against whole logits and autograd in float64.

On a CPU the kernels run in Triton's interpreter, on a GPU compiled.
"""

import pytest
import torch

pytest.importorskip("triton")

from dta_kernels.logprobs import fused_logits
from dta_kernels.logprobs.linear import linear_logprobs
from dta_kernels.logprobs.logit_chunks import Head
from dta_kernels.logprobs.reverse_kl import ReverseKLSettings, TeacherRows, linear_reverse_kl, reverse_kl_reference
from linear_logprobs_cases import chunks_of, random_case
from tree_attention_cases import poisoned_memory
from triton_device import DEVICE, kernels_run

TEMPERATURE = 0.7
BOTH = pytest.mark.parametrize("fused", [False, pytest.param(True, marks=kernels_run)])


def case_of(seed: int, dtype: torch.dtype, factor: float = 1.0) -> tuple:
    """Hidden states of very different lengths, weight, edges, and gradients of logprobs and entropies."""
    hidden, weight, edge_row, target = random_case(seed, torch.float64)
    hidden = hidden.detach() * factor * torch.linspace(0.1, 2, len(hidden))[:, None]
    tensors = hidden.to(dtype), weight.detach().to(dtype), edge_row, target
    return *(x.to(DEVICE) for x in tensors), [torch.randn(n, device=DEVICE) for n in (len(target), len(hidden))]


def run(case: tuple, which: tuple[int, ...], chunk_rows: int, **more: object) -> list[torch.Tensor]:
    """Logprobs, entropies, and the gradients from those of the outputs ``which``."""
    hidden, weight, edge_row, target, upstream = case
    inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
    chunks = chunks_of(len(hidden), edge_row.cpu(), chunk_rows)
    with poisoned_memory():
        outputs = linear_logprobs(*inputs, edge_row, target, chunks, TEMPERATURE, **more)
        return [x.detach() for x in outputs] + _gradients(outputs, inputs, which, upstream)


def truth(case: tuple, which: tuple[int, ...]) -> list[torch.Tensor]:
    hidden, weight, edge_row, target, upstream = case
    inputs = [x.double().requires_grad_() for x in (hidden, weight)]
    logprobs = torch.log_softmax(inputs[0] @ inputs[1].t() / TEMPERATURE, dim=-1)
    outputs = logprobs[edge_row, target], -(logprobs.exp() * logprobs).sum(-1)
    return [x.detach() for x in outputs] + _gradients(outputs, inputs, which, upstream)


def _gradients(outputs: tuple, inputs: list, which: tuple[int, ...], upstream: list) -> list[torch.Tensor]:
    chosen = [outputs[i] for i in which]
    return list(torch.autograd.grad(chosen, inputs, [upstream[i].to(x) for i, x in zip(which, chosen, strict=True)]))


@BOTH
@pytest.mark.parametrize(
    ("which", "block", "chunk_rows"), [((0, 1), 16, 5), ((0,), 16, 100), ((1,), 4096, 1), ((0, 1), 4096, 23)]
)
def test_equals_log_softmax(fused, which, block, chunk_rows, monkeypatch):
    monkeypatch.setattr(fused_logits, "_BLOCK", block)
    case = case_of(chunk_rows, torch.float32 if fused else torch.float64, factor=3.0)
    tolerance = 2e-5 if fused else 1e-12
    for actual, wanted in zip(run(case, which, chunk_rows, fused=fused), truth(case, which), strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


@kernels_run
def test_bfloat16_is_as_near_to_float64_as_the_plain_twin():
    case, both = case_of(3, torch.bfloat16), (0, 1)
    fused, plain, exact = run(case, both, 6, fused=True), run(case, both, 6, fused=False), truth(case, both)
    for actual, other, wanted in zip(fused, plain, exact, strict=True):
        assert actual.dtype == other.dtype
        errors = [float((x.double() - wanted).norm()) for x in (actual, other)]
        # The interpreter rounds to bfloat16 towards zero, twice the error of rounding to nearest.
        assert errors[0] <= (2.2 if DEVICE.type == "cpu" else 1.1) * errors[1] + 1e-6, errors


@BOTH
def test_large_logits_stay_finite_and_a_repeat_changes_no_bit(fused):
    case = case_of(4, torch.float32, factor=1e4)
    results = [run(case, (0, 1), 6, fused=fused) for _ in range(2)]
    assert all(torch.isfinite(x).all() for x in results[0])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@BOTH
def test_float32_logits_are_not_rounded(fused):
    hidden, weight, *rest = case_of(6, torch.bfloat16)
    expected = run((hidden.float(), weight.float(), *rest), (0, 1), 9, fused=False)
    actual = run((hidden, weight, *rest), (0, 1), 9, fused=fused, in_float32=True)
    rounded = run((hidden, weight, *rest), (0, 1), 9, fused=fused)
    for got, exact, coarse in zip(actual[:2], expected[:2], rounded[:2], strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=2e-6)
        assert (coarse - exact).abs().max() > 1e-3
    for got, exact in zip(actual[2:], expected[2:], strict=True):
        # The gradient of the logits, and what follows, is rounded to bfloat16 as before.
        assert got.dtype == torch.bfloat16
        assert (got.float() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize(("rows_per_chunk", "buffer"), [(1, False), (4, True), (100, True)])
def test_the_chunked_divergence(rows_per_chunk: int, buffer: bool):
    """Values and gradients against autograd on whole logits, also with large logits; odd sizes, NaN-free outputs."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, states, teacher_weight = (
        torch.randn(size, generator=generator, dtype=torch.float64) * 3 for size in ((13, 5), (11, 5), (13, 7), (11, 7))
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    upstream = torch.randn(13, generator=generator, dtype=torch.float64)
    expected = reverse_kl_reference(hidden @ weight.t(), states @ teacher_weight.t(), 0.6)
    wanted = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    sums = torch.full_like(weight, 2.0).detach() if buffer else None
    used = weight.detach() if buffer else weight
    settings = ReverseKLSettings(rows_per_chunk, 0.6, weight_grad=sums)
    divergence = linear_reverse_kl(hidden, used, TeacherRows(states, Head(teacher_weight)), settings)
    assert torch.allclose(divergence, expected, rtol=1e-12, atol=1e-12)
    hidden.grad = weight.grad = None
    divergence.backward(upstream)
    assert torch.allclose(hidden.grad, wanted[0], rtol=1e-11, atol=1e-12)
    assert torch.allclose(sums - 2.0 if buffer else weight.grad, wanted[1], rtol=1e-11, atol=1e-12)
    same = linear_reverse_kl(
        hidden, used, TeacherRows(hidden.detach(), Head(used.detach())), settings._replace(weight_grad=None)
    )
    assert float(same.detach().abs().max()) < 1e-13
