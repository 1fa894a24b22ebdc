"""A short causal convolution along the paths of a tree, followed by SiLU.

Each token's output needs its own row and those of its W - 1 predecessors on its path: earlier rows of its run, and
where the run begins, rows of other runs. In plain PyTorch the rows are laid out with every run behind its W - 1
predecessors; a row that several runs need is there several times. In this layout the convolution is a sum of W shifted
slices, for runs of any length, and the rows that only serve others are left out of the output. The kernels
(``convolution_kernels``) read rows by index instead. Gradients are summed in a fixed order.

Legend: N tokens, C channels, W width, R runs, M = N + R (W - 1) rows of the layout, S rows that exist: the N tokens,
then rows from outside.
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
        token_row: int64 [N], each token's row in the layout; the W - 1 rows before it are its predecessors.
        head: int64 [R], first token of each run.
        run_end: int64 [N], one past the last token of each token's run.
        uses_kernels: whether the kernels run instead of plain PyTorch.
    """

    source: Tensor
    token_row: Tensor
    head: Tensor
    run_end: Tensor
    uses_kernels: bool = False

    def taps(self, width: int) -> Tensor:
        """The rows that each token sees, itself last, int64 [N, W]."""
        return self.source[self.token_row.unsqueeze(1) + torch.arange(1 - width, 1, device=self.token_row.device)]

    def sources_before(self, width: int) -> Tensor:
        """The rows before each run, int64 [R, W - 1]."""
        first = self.token_row[self.head].unsqueeze(1)
        return self.source[first + torch.arange(1 - width, 0, device=first.device)]


def short_convolution(
    rows_NC: Tensor, before: Tensor, weight_CW: Tensor, layout: PathLayout, bias_C: Tensor | None = None
) -> Tensor:
    """``silu`` of the convolution of every token, [N, C]; without autograd.

    Args:
        rows_NC: the tokens' rows.
        before: [S - N, C], the rows from outside.
    """
    if layout.uses_kernels:
        from dta_kernels.recurrence.convolution_kernels import convolution_forward

        return convolution_forward(rows_NC, before, weight_CW, layout.taps(weight_CW.shape[1]), bias_C)
    dtype = accumulation_dtype(rows_NC.dtype)
    mixed = _convolved(_laid_out(rows_NC, before, layout), weight_CW.to(dtype), bias_C)
    return F.silu(mixed.index_select(0, layout.token_row)).to(rows_NC.dtype)


def short_convolution_gradients(
    grad_out_NC: Tensor, rows_NC: Tensor, before: Tensor, weight_CW: Tensor, layout: PathLayout,
    bias_C: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of rows [N, C] and ``before`` [S - N, C], in at least float32, of the weight and of any bias."""
    W, num_tokens = weight_CW.shape[1], rows_NC.shape[0]
    gradients = _gradients_by_kernels if layout.uses_kernels else _gradients
    grad_rows, grad_before, grad_weight, mixed = gradients(grad_out_NC, rows_NC, before, weight_CW, layout, bias_C)
    num_rows = num_tokens + before.shape[0]
    grad_x = sum_rows_by_source(grad_before, layout.sources_before(W).flatten(), num_rows + 1, grad_rows)
    grad_bias = None if bias_C is None else mixed.sum(0).to(bias_C.dtype)
    return grad_x[:num_tokens], grad_x[num_tokens:num_rows], grad_weight.to(weight_CW.dtype), grad_bias


def sum_rows_by_source(rows: Tensor, source: Tensor, num_sources: int, onto: Tensor | None = None) -> Tensor:
    """Sum ``rows`` [M, ...] with equal ``source`` [M], in the order of the rows: [num_sources, ...].

    Args:
        onto: the first sums begin with these values.
    """
    missing = num_sources - (0 if onto is None else onto.shape[0])
    total = rows.new_zeros(missing, *rows.shape[1:])
    total = total if onto is None else torch.cat([onto, total])
    # index_put_ sorts its indices on a GPU, where index_add_ would add in any order.
    return total.index_put_((source,), rows, accumulate=True)


def _gradients(
    grad_out_NC: Tensor, rows_NC: Tensor, before: Tensor, weight_CW: Tensor, layout: PathLayout, bias_C: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows by their own runs, of those before each run [R (W - 1), C], the weight, ``silu``'s input."""
    dtype, width = accumulation_dtype(rows_NC.dtype), weight_CW.shape[1]
    weight, laid = weight_CW.to(dtype), _laid_out(rows_NC, before, layout)
    mixed = _convolved(laid, weight, bias_C).index_select(0, layout.token_row)
    gate = mixed.sigmoid()
    grad = torch.zeros(laid.shape, dtype=dtype, device=laid.device)
    grad_mixed = grad_out_NC.to(dtype) * gate * (1 + mixed * (1 - gate))
    grad[layout.token_row] = grad_mixed
    grad_laid, grad_weight, M = torch.zeros_like(grad), torch.empty_like(weight), laid.shape[0]
    for w in range(width):
        back = width - 1 - w
        grad_laid[: M - back] += weight[:, w] * grad[back:]
        grad_weight[:, w] = (grad[back:] * laid[: M - back].to(dtype)).sum(0)
    first = layout.token_row[layout.head].unsqueeze(1) + torch.arange(1 - width, 0, device=laid.device)
    grad_before = grad_laid.index_select(0, first.flatten())
    return grad_laid.index_select(0, layout.token_row), grad_before, grad_weight, grad_mixed


def _gradients_by_kernels(
    grad_out_NC: Tensor, rows_NC: Tensor, before: Tensor, weight_CW: Tensor, layout: PathLayout, bias_C: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by the kernels, which leave out the rows before each run."""
    from dta_kernels.recurrence.convolution_kernels import convolution_gradients

    width, head = weight_CW.shape[1], layout.head
    taps, weight = layout.taps(width), weight_CW.to(torch.float32)
    mixed, grad_rows, grad_weight = convolution_gradients(
        grad_out_NC, rows_NC, before, weight_CW, taps, layout.run_end, bias_C
    )
    grad_before = mixed.new_zeros(head.shape[0], width - 1, mixed.shape[1])
    for later in range(width - 1):
        # The run's token number ``later`` sees the rows before the run from number ``later`` on.
        token = head + later
        exists = (token < layout.run_end[head]).unsqueeze(1)
        grad = mixed.index_select(0, token.clamp_max(mixed.shape[0] - 1)) * exists
        for row in range(later, width - 1):
            grad_before[:, row] += grad * weight[:, row - later]
    return grad_rows, grad_before.flatten(0, 1), grad_weight, mixed


def _laid_out(rows_NC: Tensor, before: Tensor, layout: PathLayout) -> Tensor:
    return torch.cat([rows_NC, before, rows_NC.new_zeros(1, rows_NC.shape[1])]).index_select(0, layout.source)


def _convolved(laid_MC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """The convolution of every row of the layout, in the dtype of the weight."""
    width, M = weight_CW.shape[1], laid_MC.shape[0]
    out = laid_MC.to(weight_CW.dtype) * weight_CW[:, width - 1]
    out = out if bias_C is None else out + bias_C.to(out.dtype)
    for w in range(width - 1):
        back = width - 1 - w
        out[back:] += laid_MC[: M - back].to(weight_CW.dtype) * weight_CW[:, w]
    return out
