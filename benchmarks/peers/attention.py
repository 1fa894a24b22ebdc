"""Varlen attention kernels under the signature that TRL's tree attention calls (that of FlashAttention 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Varlen = Callable[..., Tensor]
KERNELS = ("auto", "fa4", "torch")


def flash_attention_4(
    query: Tensor, key: Tensor, value: Tensor, *lengths: Any, softmax_scale: float | None = None, **unused: Any
) -> Tensor:
    """FlashAttention 4; ``lengths`` are the bounds of queries and keys and their longest lengths."""
    from flash_attn.cute import flash_attn_varlen_func

    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    bounds = dict(zip(names, lengths, strict=True))
    out = flash_attn_varlen_func(query, key, value, **bounds, softmax_scale=softmax_scale, causal=True)
    return out[0] if isinstance(out, tuple) else out


def flash_attention_2(
    query: Tensor, key: Tensor, value: Tensor, *lengths: Any, softmax_scale: float | None = None, **unused: Any
) -> Tensor:
    """FlashAttention 2, which PyTorch contains."""
    attention = torch.ops.aten._flash_attention_forward
    return attention(query, key, value, *lengths, 0.0, True, False, scale=softmax_scale)[0]


def choose(kernel: str, heads: tuple[int, int, int]) -> tuple[str, Varlen]:
    """Name and function of a kernel. "auto" is FlashAttention 4 if a small forward and backward of it runs.

    Args:
        heads: query heads, key/value heads and their size.
    """
    if kernel == "torch":
        return "FlashAttention 2 of PyTorch", flash_attention_2
    try:
        error = _error(flash_attention_4, heads)
    except Exception as raised:  # a beta and its compiler raise many types
        error = f"{type(raised).__name__}: {raised}"
    if error is None:
        return "FlashAttention 4", flash_attention_4
    if kernel == "fa4":
        raise RuntimeError(f"FlashAttention 4 does not run: {error}")
    return f"FlashAttention 2 of PyTorch, because FlashAttention 4 does not run: {error[:200]}", flash_attention_2


def _error(varlen: Varlen, heads: tuple[int, int, int]) -> str | None:
    """What is wrong with a kernel's gradients beside PyTorch's kernel, on two segments of which one has a prefix."""
    queries, keys, size = heads
    bounds = [torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ([0, 200, 300], [0, 200, 500])]
    shapes = ((300, queries), (500, keys), (500, keys))
    torch.manual_seed(3)
    tensors = [torch.randn(*shape, size, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    results = []
    for function in (varlen, flash_attention_2):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        function(*inputs, *bounds, 200, 300).square().sum().backward()
        results.append([tensor.grad.float() for tensor in inputs])
    gaps = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(*results, strict=True)]
    return None if max(gaps) < 0.03 else f"its gradients are off by {max(gaps):.3f}"
