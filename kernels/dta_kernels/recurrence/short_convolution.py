"""A short causal convolution along the paths of a tree, followed by SiLU.

Each token's output needs its own row and those of its W - 1 predecessors on its path. The rows are therefore laid out
with every run behind its W - 1 predecessors; a row that several runs need is there several times. In this layout the
convolution is a sum of W shifted slices, for runs of any length, and the rows that only serve others are left out of
the output. Gradients are summed in a fixed order.

Legend: N tokens, C channels, W width, M rows of the layout, S rows that exist: N tokens, then rows from outside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.tree_attention.reference import accumulation_dtype


class PathLayout(NamedTuple):
    """Where the rows of a convolution come from.

    Attributes:
        source: int64 [M], for each row of the layout one of the S rows, or S for a row of zeros (before a root).
        place: int64 [N], each token's row in the layout; the W - 1 rows before it are its predecessors.
    """

    source: Tensor
    place: Tensor


def short_convolution(rows_SC: Tensor, weight_CW: Tensor, layout: PathLayout) -> Tensor:
    """``silu`` of the convolution of every token, [N, C]; without autograd."""
    dtype = accumulation_dtype(rows_SC.dtype)
    mixed = _convolved(_laid_out(rows_SC, layout), weight_CW.to(dtype))
    return F.silu(mixed.index_select(0, layout.place)).to(rows_SC.dtype)


def short_convolution_gradients(
    grad_out_NC: Tensor, rows_SC: Tensor, weight_CW: Tensor, layout: PathLayout
) -> tuple[Tensor, Tensor]:
    """Gradients by the rows [S, C], in at least float32, and by the weight [C, W]."""
    dtype, width = accumulation_dtype(rows_SC.dtype), weight_CW.shape[1]
    weight, laid = weight_CW.to(dtype), _laid_out(rows_SC, layout)
    mixed = _convolved(laid, weight).index_select(0, layout.place)
    gate = mixed.sigmoid()
    own = grad_out_NC.to(dtype) * gate * (1 + mixed * (1 - gate))
    grad = torch.zeros(laid.shape, dtype=dtype, device=laid.device)
    grad[layout.place] = own
    grad_laid = torch.zeros_like(grad)
    grad_weight = torch.empty_like(weight)
    M = laid.shape[0]
    for w in range(width):
        back = width - 1 - w
        grad_laid[: M - back] += weight[:, w] * grad[back:]
        grad_weight[:, w] = (grad[back:] * laid[: M - back].to(dtype)).sum(0)
    grad_rows = sum_rows_by_source(grad_laid, layout.source, rows_SC.shape[0] + 1)
    return grad_rows[:-1], grad_weight.to(weight_CW.dtype)


def sum_rows_by_source(rows: Tensor, source: Tensor, num_sources: int) -> Tensor:
    """Sum ``rows`` [M, ...] with equal ``source`` [M], in the order of the rows: [num_sources, ...]."""
    # index_put_ sorts its indices on a GPU, where index_add_ would add in any order.
    return rows.new_zeros(num_sources, *rows.shape[1:]).index_put_((source,), rows, accumulate=True)


def _laid_out(rows_SC: Tensor, layout: PathLayout) -> Tensor:
    return torch.cat([rows_SC, rows_SC.new_zeros(1, rows_SC.shape[1])]).index_select(0, layout.source)


def _convolved(laid_MC: Tensor, weight_CW: Tensor) -> Tensor:
    """The convolution of every row of the layout, in the dtype of the weight."""
    width, M = weight_CW.shape[1], laid_MC.shape[0]
    out = laid_MC.to(weight_CW.dtype) * weight_CW[:, width - 1]
    for w in range(width - 1):
        back = width - 1 - w
        out[back:] += laid_MC[: M - back].to(weight_CW.dtype) * weight_CW[:, w]
    return out
