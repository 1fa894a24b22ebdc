"""Arranges tokens for the experts of a rank: a row for each pair of a token and an expert, ordered by expert.

Every index is computed on the device. The number of rows of a rank that shares its experts with other ranks follows
from the routing of all their tokens; ``HostCounts`` brings it to the host while the tokens travel.

A token's rows are summed in the order of the experts, in at least float32, and rounded once. On a CPU that is
Megatron's order, so results on one rank are the same bit for bit in float32 and float64.

Legend: R tokens that the rank has received, C hidden size, K experts of each token, L experts of the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dta_kernels.experts.reference import order_rows

RowSums = Callable[[Tensor, Tensor], Tensor]
"""``sum_rows`` of the kernels or of their reference."""
RowOrder = Callable[[Tensor, int, int, int], tuple[Tensor, Tensor, Tensor, Tensor]]
"""``order_rows`` of the kernels or of their reference."""


class ExpertRows(NamedTuple):
    """The rows of a rank's experts, one expert after another.

    Attributes:
        counts: int64 [L], rows of each expert.
        entries: [largest possible number of rows], for each row its entry in a flat [R, K]; the rest is arbitrary.
        tokens: the same shape, for each row its token.
        token_rows: [R, K], for each token its rows, ascending, then -1 for its experts on other ranks.
        host: ``counts`` on the host.
    """

    counts: Tensor
    entries: Tensor
    tokens: Tensor
    token_rows: Tensor
    host: HostCounts

    @property
    def most(self) -> int:
        """Largest possible number of rows."""
        return len(self.entries)


class HostCounts:
    """Copies ``counts`` to the host without waiting; reading them waits for the copy.

    Args:
        total: their sum, if it is known without the copy.
    """

    def __init__(self, counts_L: Tensor, total: int | None = None) -> None:
        self._counts, self._total, self._copied = counts_L, total, None
        if counts_L.device.type == "cuda" and total is None:
            self._counts = torch.empty(counts_L.shape, dtype=counts_L.dtype, pin_memory=True)
            self._counts.copy_(counts_L, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tolist(self) -> list[int]:
        """Rows of each expert."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._counts.tolist()

    @property
    def is_pending(self) -> bool:
        """Whether reading the number of rows may wait for the device."""
        return self._total is None

    @property
    def total(self) -> int:
        """Number of rows."""
        if self._total is None:
            self._total = sum(self.tolist())
        return self._total


def expert_rows(
    chosen_RK: Tensor, first: int, num_local: int, are_all_here: bool, order: RowOrder = order_rows
) -> ExpertRows:
    """The rows of experts ``first`` to ``first + num_local - 1`` for the chosen experts of each token.

    Args:
        chosen_RK: integers; a token must not choose an expert twice. Negative where there is no token.
        are_all_here: whether all chosen experts are these.
        order: ``order_rows`` of the kernels or of their reference.
    """
    num_tokens, experts_per_token = chosen_RK.shape
    most = num_tokens * (experts_per_token if are_all_here else min(experts_per_token, num_local))
    counts, entries, tokens, token_rows = order(chosen_RK, first, num_local, most)
    return ExpertRows(counts, entries, tokens, token_rows, HostCounts(counts, most if are_all_here else None))


class ToRows(torch.autograd.Function):
    """Rows of tokens [R, C], and weights of these rows of weights [R, K]; the host waits for their number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, rows: ExpertRows, sums: RowSums) -> tuple[Tensor, Tensor]:
        entries = rows.entries[: rows.host.total]
        ctx.save_for_backward(entries, rows.token_rows)
        ctx.sums = sums
        return x.index_select(0, rows.tokens[: len(entries)]), weights.flatten().index_select(0, entries)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple:
        entries, place_RK = ctx.saved_tensors
        grad_x = ctx.sums(grad_rows, place_RK) if ctx.needs_input_grad[0] else None
        return grad_x, scattered(grad_weights, entries, place_RK.shape), None, None


class ToTokens(torch.autograd.Function):
    """Sums [R, C] of each token's rows."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows: ExpertRows, sums: RowSums) -> Tensor:
        ctx.save_for_backward(rows.tokens[: len(outputs)])
        return sums(outputs, rows.token_rows)

    @staticmethod
    def backward(ctx: Any, grad_RC: Tensor) -> tuple:
        return grad_RC.index_select(0, *ctx.saved_tensors), None, None


def scattered(values: Tensor, entries: Tensor, shape: torch.Size) -> Tensor:
    """``values`` at their ``entries`` of a flat tensor of ``shape``, 0 elsewhere."""
    return values.new_zeros(shape.numel()).scatter_(0, entries, values).view(shape)
