"""The slow twin of Transformer Engine's FP8 products: Megatron's linear layers on factors rounded as a recipe says.

Scales are the largest that keep a block's largest value in range, powers of two where they are per block. Products are
exact ones of the rounded factors in float32. Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rounded(values: Tensor, number_format: str, rows: int | None, columns: int | None) -> Tensor:
    """``values`` [M, N] as float32, rounded to FP8 in blocks of ``rows`` times ``columns``; None: all as one block."""
    dtype = FORMATS[number_format]
    is_one_scale = rows is None or columns is None
    height, width = values.shape if is_one_scale else (rows, columns)
    padded = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % width, 0, -values.shape[0] % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [row block, row, column block, column]
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(largest > 0, torch.finfo(dtype).max / largest, 1.0)
    if not is_one_scale:
        scale = scale.log2().floor().exp2()
    kept = (blocks * scale).to(dtype).float() / scale
    return kept.flatten(2, 3).flatten(0, 1)[: values.shape[0], : values.shape[1]]


class _Product(torch.autograd.Function):
    """``x @ weight.T`` for x [n, in]; row blocks of 128 values, or one scale for all."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, gradient_format: str, blockwise: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient_format, ctx.block = gradient_format, 128 if blockwise else None
        factors = rounded(x, "e4m3", 1, ctx.block), rounded(weight, "e4m3", ctx.block, ctx.block)
        return (factors[0] @ factors[1].t()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        (x, weight), block = ctx.saved_tensors, ctx.block
        by_row = rounded(gradient, ctx.gradient_format, 1, block)
        by_column = rounded(gradient, ctx.gradient_format, block, 1)
        to_x = by_row @ rounded(weight, "e4m3", block, block)
        to_weight = by_column.t() @ rounded(x, "e4m3", block, 1)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None, None


def compute_in_fp8(model: torch.nn.Module, number_format: str, recipe: str) -> None:
    """Let the local linear layers of a model without biases compute as ``--fp8-format`` and ``--fp8-recipe`` say."""
    gradient_format = "e5m2" if number_format == "hybrid" else "e4m3"

    def forward_of(layer: torch.nn.Module) -> Callable:
        def forward(x: Tensor, *_: object) -> tuple[Tensor, None]:
            out = _Product.apply(x.reshape(-1, x.shape[-1]), layer.weight, gradient_format, recipe == "blockwise")
            return out.view(*x.shape[:-1], -1), None

        return forward

    layers = [layer for name, layer in model.named_modules() if name.rsplit(".", 1)[-1] in LINEAR]
    assert layers
    for layer in layers:
        assert layer.bias is None
        layer.forward = forward_of(layer)
