"""Grouped rows of which the host knows how many each group has."""

from __future__ import annotations

import torch
from torch import Tensor

from dta_kernels.experts.grouped_products import GroupedRows


def grouped_rows(counts: list[int], like: Tensor, index: Tensor | None = None) -> GroupedRows:
    return GroupedRows(torch.tensor(counts, device=like.device), like, sum(counts), index)
