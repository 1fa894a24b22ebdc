"""Exchanges rows among the ranks that share experts: a token travels once to each rank, and one sum comes back.

Every rank gets the tokens of all ranks (*gather*), computes the outputs of its experts, and adds up those of each
token. These sums return to the token's rank (*give back*), which adds them in the order of the ranks. Each movement is
the other one's backward. With experts divided by tensor parallelism too, the ranks of both groups are one group, and a
rank's sum is over its parts of its experts.

All sizes follow from the plan: a pass has at most ``rows_per_rank`` rows on any rank, and blocks of that size travel,
so the host waits for no counts. With up to 8 ranks, few transfers of a token are unnecessary: if it chooses 8 experts
among those of 4 ranks, a rank has none of them with probability 0.1. Sending a copy for each expert would take K / T
times the traffic (K experts of a token, T ranks); with more ranks than K, this exchange is the larger one.

A movement starts in one autograd function and ends in another, in both directions, so what is computed between them
overlaps with it: the arrangement of rows, shared experts, and weight gradients (``later``).

Legend: N rows of this rank, T ranks, M ``rows_per_rank``, R = T M rows of all ranks, C hidden size, K experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron_dta.core.model.experts.expert_rows import RowSums

# PyTorch 2.13 renames it.
_all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


class RowExchange:
    """The movements of one layer in one pass; forward and backward each run every movement once.

    Args:
        group: the ranks that exchange rows.
        num_rows: rows of this rank.
        rows_per_rank: maximum number of rows of any rank, the same number on all of them.
        sums: ``sum_rows`` of the kernels or of the reference.

    Raises:
        ValueError: this rank has more rows than the plan allows.
    """

    def __init__(self, group: ProcessGroup, num_rows: int, rows_per_rank: int, sums: RowSums) -> None:
        if num_rows > rows_per_rank:
            raise ValueError(f"a rank has {num_rows} rows in a pass planned for at most {rows_per_rank} on each rank")
        self.num_rows, self.rows_per_rank, self.num_ranks = num_rows, rows_per_rank, group.size()
        self._group, self._sums = group, sums
        self._works: list[Work] = []
        self._later: list[Callable[[], None]] = []

    def start_gather(self, rows: Tensor) -> Tensor:
        """Start to gather ``rows`` [N, ...] of all ranks into [R, ...]."""
        sent = rows.contiguous()
        if len(sent) < self.rows_per_rank:
            sent = sent.new_empty(self.rows_per_rank, *sent.shape[1:])
            sent[: len(rows)] = rows
        gathered = sent.new_empty(self.num_ranks * self.rows_per_rank, *sent.shape[1:])
        self._works.append(_all_gather(_bytes(gathered), _bytes(sent), group=self._group, async_op=True))
        return gathered

    def gather(self, rows: Tensor) -> Tensor:
        """``start_gather``, complete on return."""
        gathered = self.start_gather(rows)
        self._works.pop().wait()
        return gathered

    def start_tokens(self, x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Start to gather tokens [R, C]; weights and experts [R, K] are complete on return, -1 in rows of no token."""
        missing = self.rows_per_rank - len(chosen)
        packed = torch.nn.functional.pad(chosen.to(torch.int16), (0, 0, 0, missing), value=-1)
        packed = torch.cat([_bytes(torch.nn.functional.pad(weights, (0, 0, 0, missing))), _bytes(packed)], dim=1)
        routing = self.gather(packed)
        size = weights.shape[1] * weights.element_size()
        all_weights = routing[:, :size].contiguous().view(weights.dtype)
        all_chosen = routing[:, size:].contiguous().view(torch.int16)
        return self.start_gather(x), all_weights, all_chosen

    def start_give_back(self, rows: Tensor) -> Tensor:
        """Start to send ``rows`` [R, ...], M for each rank, to these ranks; [R, ...] with M from each rank."""
        received, rows = torch.empty_like(rows, memory_format=torch.contiguous_format), rows.contiguous()
        self._works.append(
            torch.distributed.all_to_all_single(_bytes(received), _bytes(rows), group=self._group, async_op=True)
        )
        return received

    def wait(self) -> None:
        """Wait for the movements that were started; on a GPU, the stream waits and not the host."""
        for compute in self._later:
            compute()
        self._later.clear()
        for work in self._works:
            work.wait()
        self._works.clear()

    def later(self, compute: Callable[[], None]) -> None:
        """Call ``compute`` once the next movement has started; its result must not be needed before."""
        self._later.append(compute)

    def sums(self, blocks: Tensor) -> Tensor:
        """Sums [N, ...] over the ranks of what they gave back [R, ...], in the order of the ranks."""
        slots = torch.arange(len(blocks), device=blocks.device).view(self.num_ranks, self.rows_per_rank)
        return self._sums(blocks, slots[:, : self.num_rows].t())

    def begin_gather(self, x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        """``start_tokens`` in the graph of a backward."""
        return _StartGather.apply(x, weights, chosen, self)

    def end_gather(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What ``begin_gather`` returned, complete."""
        return _EndGather.apply(x, weights, self)

    def give_back(self, partial: Tensor) -> Tensor:
        """Sums [N, C] over all experts, from the sums [R, C] of each rank's experts."""
        return _EndGiveBack.apply(_StartGiveBack.apply(partial, self), self)


def _bytes(tensor: Tensor) -> Tensor:
    """Not every backend moves every dtype."""
    return tensor.view(torch.uint8)


class _StartGather(torch.autograd.Function):
    """Tokens [R, C] of all ranks, which may be read after ``_EndGather``, with their weights and experts [R, K].

    Routing is exchanged first, so that rows can be arranged while the tokens travel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, exchange: RowExchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        gathered = exchange.start_tokens(x, weights, chosen)
        ctx.mark_non_differentiable(gathered[2])
        ctx.set_materialize_grads(False)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad_RC: Tensor, grad_RK: Tensor, _: Any) -> tuple:
        ctx.exchange.wait()
        return ctx.exchange.sums(grad_RC), ctx.exchange.sums(grad_RK), None, None


class _EndGather(torch.autograd.Function):
    """Waits for tokens and weights; backward starts to give back their gradients."""

    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, weights_RK: Tensor, exchange: RowExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.wait()
        return x_RC.view_as(x_RC), weights_RK.view_as(weights_RK)

    @staticmethod
    def backward(ctx: Any, grad_RC: Tensor, grad_RK: Tensor) -> tuple:
        return ctx.exchange.start_give_back(grad_RC), ctx.exchange.start_give_back(grad_RK), None


class _StartGiveBack(torch.autograd.Function):
    """Sums [R, C] of each rank's experts for this rank's rows, which may be read by ``_EndGiveBack``."""

    @staticmethod
    def forward(ctx: Any, partial_RC: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start_give_back(partial_RC)

    @staticmethod
    def backward(ctx: Any, grad_RC: Tensor) -> tuple:
        ctx.exchange.wait()
        return grad_RC, None


class _EndGiveBack(torch.autograd.Function):
    """Sums [N, C] over all experts; backward starts to gather their gradients."""

    @staticmethod
    def forward(ctx: Any, partial_RC: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return exchange.sums(partial_RC)

    @staticmethod
    def backward(ctx: Any, grad_NC: Tensor) -> tuple:
        return ctx.exchange.start_gather(grad_NC), None
