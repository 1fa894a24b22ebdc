"""Sums of a few rows each in plain PyTorch: reference of ``row_sums`` for any device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_rows(rows_RC: Tensor, places_NK: Tensor) -> Tensor:
    """Sums [N, C] of the K rows at each of N ``places``, in order, rounded once; without autograd."""
    dtype = torch.promote_types(rows_RC.dtype, torch.float32)
    first, *others = places_NK.unbind(1)
    total = rows_RC.index_select(0, first).to(dtype)
    for place in others:
        total += rows_RC.index_select(0, place)
    return total.to(rows_RC.dtype)
