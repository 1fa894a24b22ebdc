"""The chunked divergence from a teacher against autograd on whole logits."""

import pytest
import torch

from dta_kernels.logprobs.logit_chunks import Head
from dta_kernels.logprobs.reverse_kl import ReverseKLSettings, TeacherRows, linear_reverse_kl, reverse_kl_reference


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
