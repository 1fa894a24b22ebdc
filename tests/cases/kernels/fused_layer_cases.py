"""Random inputs of the fused layer kernels, and plain references of their outputs and gradients in any precision."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dta_kernels.layers import reference
from dta_kernels.layers.qkv_rope import MixedQKV, QKVLayout, qkv_rope
from dta_kernels.layers.rms_norm import rms_norm, rms_norm_again
from dta_kernels.layers.swiglu import swiglu, swiglu_into

EPS = 1e-6
Run = Callable[..., tuple[Tensor, ...]]


def norm_case(rows: int, columns: int, add: bool) -> tuple[Run, Run, list[Tensor]]:
    """Kernel, twin and float32 inputs."""
    inputs = [torch.randn(rows, 1, columns), 1 + 0.3 * torch.randn(columns)]
    inputs += [torch.randn(rows, 1, columns)] if add else []

    def kernel(x: Tensor, weight: Tensor, *added: Tensor) -> tuple[Tensor, ...]:
        return rms_norm(x, weight, EPS, *added)[:2]

    def twin(x: Tensor, weight: Tensor, *added: Tensor) -> tuple[Tensor, ...]:
        return reference.rms_norm(x, weight, EPS, *added)

    return kernel, twin, inputs


def tables(rows: int, rotated: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [rows, rotated / 2], with an attention factor."""
    angle = torch.rand(rows, rotated // 2) * 100
    return (1.2 * angle.cos()).to(device), (1.2 * angle.sin()).to(device)


def qkv_case(
    rows: int, layout: QKVLayout, rotated: int, norm: bool, device: torch.device | str = "cpu"
) -> tuple[Run, Run, list[Tensor]]:
    groups, heads, size = layout
    cos, sin = tables(rows, rotated, device)
    inputs = [torch.randn(rows, groups * (heads + 2) * size)]
    inputs += [1 + 0.3 * torch.randn(size) for _ in range(2)] if norm else []

    def kernel(mixed: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return qkv_rope(MixedQKV(mixed, cos, sin, *(weights or (None, None)), layout, EPS))

    def twin(mixed: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return reference.qkv_rope(mixed, cos, sin, *(weights or (None, None)), groups, heads, EPS)

    return kernel, twin, inputs


def swiglu_case(rows: int, width: int) -> tuple[Run, Run, list[Tensor]]:
    return lambda x: (swiglu(x),), lambda x: (reference.swiglu(x),), [3 * torch.randn(rows, 1, 2 * width)]


def outputs_and_gradients(run: Run, inputs: list[Tensor], grads: list[Tensor] | None) -> list[Tensor]:
    """Outputs, and gradients of all inputs given those by the outputs (random for None, from a fixed seed)."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = run(*inputs)
    if grads is None:
        generator = torch.Generator().manual_seed(5)
        grads = [torch.randn(out.shape, generator=generator) for out in outputs]
    grads = [grad.to(out) for grad, out in zip(grads, outputs, strict=True)]
    return [out.detach() for out in outputs] + list(torch.autograd.grad(outputs, inputs, grads))


def errors(actual: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Largest error of each tensor, relative to the largest entry; 0 for empty ones, infinite where one is NaN."""
    result = []
    for got, want in zip(actual, wanted, strict=True):
        assert got.shape == want.shape
        scale = want.abs().max() if want.numel() else torch.ones(())
        difference = (got.double() - want.double()).abs()
        error = float(difference.max() / scale.clamp_min(1e-30)) if want.numel() else 0.0
        result.append(math.inf if math.isnan(error) else error)  # the largest of several is not asked with a NaN
    return result


def check_float32(kernel: Run, twin: Run, inputs: list[Tensor], bound: float) -> None:
    """The kernel's outputs and gradients are those of the twin in float64, and a repeat changes no bit."""
    first, again = (outputs_and_gradients(kernel, inputs, None) for _ in range(2))
    assert max(errors(first, outputs_and_gradients(twin, [tensor.double() for tensor in inputs], None))) < bound
    assert all(torch.equal(first_output, other) for first_output, other in zip(first, again, strict=True))


def check_recomputed_bits(
    dtype: torch.dtype, device: torch.device | str, columns: int, width: int, layout: QKVLayout, rotated: int
) -> None:
    """What the backward pass recomputes equals what the forward pass gave, bit for bit."""
    rows, (groups, heads, size) = 77, layout

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    weight = random(columns)
    normed, residual, rstd = rms_norm(random(rows, columns), weight, EPS, random(rows, columns))
    again = torch.empty_like(normed)
    rms_norm_again(residual, rstd, weight, again)
    assert torch.equal(again, normed)
    gated = random(rows, 2 * width)
    again = torch.empty_like(swiglu(gated))
    swiglu_into(gated, again)
    assert torch.equal(again, swiglu(gated))
    mixed = random(rows, groups * (heads + 2) * size)
    heads = MixedQKV(mixed, *tables(rows, rotated, device), random(size), random(size), layout, EPS)
    outputs = qkv_rope(heads)
    for count in (1, 2, 3):
        again = [torch.empty_like(tensor).contiguous() for tensor in outputs[:count]]
        heads.write(*again)
        assert all(map(torch.equal, again, outputs))


def mean_errors(actual: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Root mean square error of each tensor, relative to its entries'."""
    pairs = zip(actual, wanted, strict=True)
    return [float((got.double() - want.double()).norm() / want.double().norm()) for got, want in pairs]


def check_16_bits(kernel: Run, twin: Run, inputs: list[Tensor], dtype: torch.dtype, bound: float) -> None:
    """The kernel's error against float64 is at most ``bound`` times the twin's, in every output and gradient."""
    inputs = [tensor.to(dtype) for tensor in inputs]
    # All three take the same rounded gradients.
    grads = [torch.randn(out.shape).to(out) for out in twin(*inputs)]
    actual, plain = (outputs_and_gradients(run, inputs, grads) for run in (kernel, twin))
    exact = outputs_and_gradients(twin, [tensor.double() for tensor in inputs], grads)
    for error, own_tensor, twins in zip(mean_errors(actual, exact), actual, mean_errors(plain, exact), strict=True):
        assert own_tensor.dtype == dtype
        assert error <= bound * twins + 1e-5, (error, twins)
