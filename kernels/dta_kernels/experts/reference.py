"""Plain PyTorch references of the experts' kernels, for any device and dtype: grouped products and sums of rows.

Legend: R rows in all, N outputs and K inputs of a group's matrix [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient


class PlainRows:
    """Reference of ``grouped_products.GroupedRows``, with sequences of matrices instead of tables.

    Args:
        counts: rows of each group, any number.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = list(counts)

    def product(self, x_RK: Tensor, matrices_NK: Sequence[Tensor]) -> Tensor:
        """``x @ matrix.T`` [R, N]."""
        return torch.cat([x @ matrix.t() for x, matrix in zip(x_RK.split(self._counts), matrices_NK, strict=True)])

    def input_gradient(self, grad_RN: Tensor, matrices_NK: Sequence[Tensor]) -> Tensor:
        """``grad @ matrix`` [R, K]."""
        return torch.cat([grad @ matrix for grad, matrix in zip(grad_RN.split(self._counts), matrices_NK, strict=True)])

    def add_weight_gradients(self, sums_NK: Sequence[Tensor], grad_RN: Tensor, x_RK: Tensor) -> None:
        """``sum += grad.T @ x`` over each group's rows."""
        groups = zip(sums_NK, grad_RN.split(self._counts), x_RK.split(self._counts), strict=True)
        for each, grad, x in groups:
            add_weight_gradient(each, grad, x)


def sum_rows(rows_RC: Tensor, places_NK: Tensor) -> Tensor:
    """Sums [N, C] of the K rows at each of N ``places``, in order, rounded once; without autograd."""
    dtype = torch.promote_types(rows_RC.dtype, torch.float32)
    first, *others = places_NK.unbind(1)
    total = rows_RC.index_select(0, first).to(dtype)
    for place in others:
        total += rows_RC.index_select(0, place)
    return total.to(rows_RC.dtype)
