"""Plain PyTorch references of the experts' kernels, for any device and dtype: order, products and sums of rows.

Legend: R rows in all, N outputs and K inputs of a group's matrix [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dta_kernels.invariant.products import product
from dta_kernels.layers.weight_gradients import add_weight_gradient


class PlainRows:
    """Reference of ``grouped_products.GroupedRows``, with sequences of matrices instead of tables.

    Args:
        counts: rows of each group, any number.
        index_R: for each row its row in an indexed tensor.
    """

    def __init__(self, counts: Sequence[int], index_R: Tensor | None = None) -> None:
        self._counts, self._index = list(counts), index_R

    def product(self, x_RK: Tensor, matrices_NK: Sequence[Tensor], indexed: bool = False) -> Tensor:
        """``x @ matrix.T`` [R, N]."""
        groups = self._groups(x_RK, indexed)
        return torch.cat([product(x, matrix) for x, matrix in zip(groups, matrices_NK, strict=True)])

    def input_gradient(self, grad_RN: Tensor, matrices_NK: Sequence[Tensor], indexed: bool = False) -> Tensor:
        """``grad @ matrix`` [R, K]."""
        groups = self._groups(grad_RN, indexed)
        return torch.cat([grad @ matrix for grad, matrix in zip(groups, matrices_NK, strict=True)])

    def add_weight_gradients(
        self, sums_NK: Sequence[Tensor], grad_RN: Tensor, x_RK: Tensor, indexed: str | None = None
    ) -> None:
        """``sum += grad.T @ x`` over each group's rows; ``indexed`` is "grad" or "x" for the indexed tensor."""
        grads, inputs = self._groups(grad_RN, indexed == "grad"), self._groups(x_RK, indexed == "x")
        for sums, grad, x in zip(sums_NK, grads, inputs, strict=True):
            add_weight_gradient(sums, grad, x)

    def _groups(self, rows: Tensor, indexed: bool) -> Sequence[Tensor]:
        return (rows.index_select(0, self._index) if indexed else rows).split(self._counts)


def sum_rows(rows_RC: Tensor, places_NK: Tensor) -> Tensor:
    """Sums [N, C] of the rows at ``places`` (negative: none) in their order, rounded once, without autograd."""
    dtype = torch.promote_types(rows_RC.dtype, torch.float32)
    total = torch.zeros(len(places_NK), rows_RC.shape[1], dtype=dtype, device=rows_RC.device)
    if not len(rows_RC):
        return total.to(rows_RC.dtype)
    for rank_rows in places_NK.unbind(1):
        row = rows_RC.index_select(0, rank_rows.clamp(min=0)).to(dtype)
        total += row.masked_fill_((rank_rows < 0).unsqueeze(1), 0)
    return total.to(rows_RC.dtype)


def order_rows(chosen_NK: Tensor, first: int, num_local: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Orders the pairs of N tokens and their K experts by expert, for the ``num_local`` experts from ``first`` on.

    Args:
        chosen_NK: integers; a token must not choose an expert twice.
        most: number of rows to return, at least as many as there can be with these experts.

    Returns:
        The number of rows of each expert [experts]; for each row, its entry of a flat [N, K] and its token, arbitrary
        ones from the last row on [most]; for each token its rows, ascending, then -1 [N, K]. All are int64.
    """
    is_here = (chosen_NK >= first) & (chosen_NK < first + num_local)
    keys = torch.where(is_here, chosen_NK - first, num_local).flatten().long()
    # For narrow keys, a GPU sorts only a fraction of the digits.
    order = keys.to(torch.int16).argsort(stable=True)
    place_NK = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    place_NK = place_NK.view(chosen_NK.shape).masked_fill(~is_here, len(order)).sort(dim=1).values
    place_NK = place_NK.masked_fill_(place_NK == len(order), -1)
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=keys.device)
    counts = counts.scatter_add_(0, keys, torch.ones_like(keys))[:num_local]
    entries = order[:most]
    return counts, entries, entries.div(chosen_NK.shape[1], rounding_mode="floor"), place_NK
