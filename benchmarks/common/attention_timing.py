"""Times kernels of tree attention on one call: our kernels, FlashAttention 4 and FlexAttention, forward and backward.

A forward pass counts 4 x head size FLOPs for a visible pair and query head, a backward pass 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.attention_cases import AttentionCase
from common.flash_attention.plan import plan_flash_attention
from dta_kernels.tree_attention.config import TreeAttentionConfig
from dta_kernels.tree_attention.plan import AttentionShape, plan_tree_attention


class Inputs:
    """Random tensors for one case, and its visible pairs."""

    def __init__(self, case: AttentionCase, shape: AttentionShape, device: torch.device) -> None:
        self.case, self.shape, self.device = case, shape, device
        generator = torch.Generator(device).manual_seed(1)

        def normal(rows: int, heads: int) -> torch.Tensor:
            size = (rows, heads, shape.head_size)
            return torch.randn(size, device=device, dtype=shape.dtype, generator=generator)

        self.q, self.grad_out = (normal(case.num_queries, shape.num_heads) for _ in range(2))
        self.k, self.v = (normal(len(case.key_end), shape.num_groups) for _ in range(2))
        self.key_end = torch.from_numpy(case.key_end).to(device)
        self.scale = shape.head_size**-0.5

    def flops(self, backward: bool, pairs: int | None = None) -> float:
        pairs = self.case.pairs if pairs is None else pairs
        return (10 if backward else 4) * pairs * self.shape.num_heads * self.shape.head_size


@dataclass(frozen=True)
class Kernels:
    """What computes tree attention: "triton", with settings or those of the table, or "fa4"."""

    impl: str = "triton"
    config: TreeAttentionConfig | None = None


def kernel_calls(inputs: Inputs, kernels: Kernels) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward and the backward of these kernels; the backward's outputs include those of the forward."""
    from common.flash_attention import launch as flash
    from dta_kernels.tree_attention import launch

    case, attention = inputs.case, flash if kernels.impl == "fa4" else launch
    arguments = (case.key_end, case.num_queries, inputs.shape, inputs.device)
    plan = (
        plan_flash_attention(*arguments) if kernels.impl == "fa4" else plan_tree_attention(*arguments, kernels.config)
    )

    def forward() -> Any:
        return attention.tree_attention_forward(inputs.q, inputs.k, inputs.v, inputs.key_end, plan, inputs.scale)

    out, lse = forward()

    def backward() -> Any:
        return attention.tree_attention_backward(
            inputs.grad_out, inputs.q, inputs.k, inputs.v, out, lse, inputs.key_end, plan, inputs.scale
        )

    return forward, backward


def check(inputs: Inputs, kernels: Kernels) -> float:
    """Largest relative error of out, dq, dk and dv against the plain reference in float32."""
    from dta_kernels.tree_attention.reference import tree_attention_backward, tree_attention_forward

    case, device = inputs.case, inputs.device
    forward, backward = kernel_calls(inputs, kernels)
    out, _ = forward()
    key = torch.arange(len(case.key_end), device=device)
    indices = (key[case.num_ancestors :], key, inputs.key_end.long(), inputs.scale)
    q, k, v, grad_out = (tensor.float() for tensor in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
    expected, lse = tree_attention_forward(q, k, v, *indices)
    gradients = tree_attention_backward(grad_out, q, k, v, expected, lse, *indices)
    pairs = zip((out, *backward()), (expected, *gradients), strict=True)
    return max(float((actual.float() - wanted).norm() / wanted.norm()) for actual, wanted in pairs)


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a call, after a warm-up, with a cold L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def measure_kernels(inputs: Inputs, kernels: Kernels, backward_only: bool = False) -> dict[str, Any]:
    """Rates of our kernels or of FlashAttention 4."""
    forward, backward = kernel_calls(inputs, kernels)
    return rates(inputs, None if backward_only else forward, backward)


def rates(
    inputs: Inputs, forward: Callable[[], Any] | None, backward: Callable[[], Any] | None, pairs: int | None = None
) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of the calls that are given; ``pairs``: those that count, if not all visible ones."""
    row: dict[str, Any] = {}
    for name, call in (("forward", forward), ("backward", backward)):
        if call is not None:
            time = milliseconds(call)
            row[f"{name}_ms"] = time
            row[f"{name}_tflops"] = inputs.flops(name == "backward", pairs) / time / 1e9
    return row


def measure_flex(inputs: Inputs) -> dict[str, Any]:
    """FlexAttention, compiled, with the tree's mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, A, key_end = inputs.case, inputs.case.num_ancestors, inputs.key_end

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query + A) & (query + A < key_end[key])

    mask = create_block_mask(visible, None, None, case.num_queries, len(case.key_end), device=inputs.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(0, 1)[None].detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    grad_out = inputs.grad_out.transpose(0, 1)[None]

    def forward() -> Any:
        return compiled(q, k, v, block_mask=mask, scale=inputs.scale, enable_gqa=True)

    out = forward()
    return rates(inputs, forward, lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True))
