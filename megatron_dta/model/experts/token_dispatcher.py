"""Sends tokens to their experts and back: Megatron's dispatcher, with row positions computed on the device.

Megatron's dispatcher takes a map [tokens, experts] and selects rows with masks, whose sizes the host waits for. It
orders the rows by expert by splitting and concatenating one tensor for each expert, even if they are in order already.
This takes the host longer than the layer's products take the GPU. Here the router supplies the experts of each token,
and every movement of rows is a gather with an index that was computed on the device. On one rank, nothing waits for
this index. If experts are divided among ranks, Megatron's collectives run and wait for the exchanged numbers of rows,
as in Megatron.

A token's K rows are summed in the order of the experts. On a CPU that is Megatron's order, and results are the same bit
for bit in float32 and float64; 16-bit rows are summed in float32 and rounded once. A gather needs only its index for
the backward, which is the other one of the two movements.

Legend: N tokens of this rank, K experts each, E experts in all, L of them here, T ranks that exchange tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from dta_kernels.experts.reference import sum_rows

RowSums = Callable[[Tensor, Tensor], Tensor]


class Places(NamedTuple):
    """Positions of tokens among rows in expert order, and of rows for each token.

    Attributes:
        entries: [R], for each row its entry in a flat [N, K].
        tokens: [R], for each row its token.
        rows: [N, K], for each token its rows, ascending.
    """

    entries: Tensor
    tokens: Tensor
    rows: Tensor


def places_of(chosen_NK: Tensor) -> Places:
    """Places for the chosen experts of each token; a token must not choose an expert twice."""
    # For narrow keys, a GPU sorts only a fraction of the digits.
    entry_R = chosen_NK.flatten().to(torch.int16).argsort(stable=True)
    row_NK = inverse_of(entry_R).view(chosen_NK.shape).sort(dim=1).values
    return Places(entry_R, entry_R.div(chosen_NK.shape[1], rounding_mode="floor"), row_NK)


def inverse_of(order_R: Tensor) -> Tensor:
    """The inverse of the permutation ``order_R``."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def order_by_expert(counts_TL: Tensor, num_rows: int) -> Tensor:
    """Permutation [R] of rows ordered by rank, then expert, to rows ordered by expert, then rank.

    Args:
        counts_TL: int64, rows of each rank for each expert.
        num_rows: their sum, on the host.
    """
    counts_LT = counts_TL.t().flatten()
    begin_LT = (counts_TL.flatten().cumsum(0).view_as(counts_TL) - counts_TL).t().flatten()
    shift_LT = begin_LT - (counts_LT.cumsum(0) - counts_LT)
    shift_R = shift_LT.repeat_interleave(counts_LT, output_size=num_rows)
    return shift_R + torch.arange(num_rows, device=counts_TL.device)


class TreeDispatcher(MoEAlltoAllTokenDispatcher):
    """Takes experts [N, K] in place of a map, and weights [N, K] in place of weights [N, E].

    Counts of rows stay on the device; a caller that needs them on the host must fetch them.
    """

    sum_rows: RowSums = staticmethod(sum_rows)

    @classmethod
    def like(cls, other: MoEAlltoAllTokenDispatcher) -> TreeDispatcher:
        """A dispatcher for the same experts and groups."""
        groups = SimpleNamespace(ep=other.ep_group, expt_tp=other.tp_group, tp_ep=other.tp_ep_group)
        return cls(other.num_local_experts, other.local_expert_indices, config=other.config, pg_collection=groups)

    @property
    def is_divided(self) -> bool:
        """Whether tokens are exchanged with other ranks."""
        return self.ep_size * self.tp_size > 1

    def set_shared_experts(self, shared_experts: Any) -> None:
        raise NotImplementedError("shared experts that run beside the exchange of tokens are not supported")

    def dispatch_preprocess(self, hidden_states: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> tuple:
        """This rank's rows [R, C] in the order of experts, and their weights [R]."""
        self.hidden_shape, self.weights_dtype = hidden_states.shape, weights_NK.dtype
        chosen_N = chosen_NK.flatten()
        self.places = places_of(chosen_NK)
        self.counts = chosen_N.new_zeros(self.num_experts).scatter_add_(0, chosen_N, torch.ones_like(chosen_N))
        if self.is_divided:
            self._exchange_counts()
        x_NC = hidden_states.view(-1, self.hidden_shape[-1])
        return _ToRows.apply(x_NC, weights_NK, self.places, self.sum_rows)

    def _exchange_counts(self) -> None:
        """Start the copy of send and receive sizes to the host, and store each rank's rows for the experts here."""
        # Megatron sums a map over tokens here; the counts are that sum already.
        self.counts = self.preprocess(self.counts.unsqueeze(0))
        if self.num_local_experts > 1:
            # These counts are needed on the device only, so they stay there.
            self.counts_TL, self.num_global_tokens_per_local_expert = self.num_global_tokens_per_local_expert, None
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", None)

    def token_dispatch(self, rows_RC: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        return super().token_dispatch(rows_RC, weights_R) if self.is_divided else (rows_RC, weights_R)

    def dispatch_postprocess(self, rows_RC: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in the order of this rank's experts, rows of each expert [L] on the device, and weights."""
        if self.tp_size > 1:
            sizes = self.output_splits_tp.tolist()
            rows_RC, weights_R = (
                gather_from_sequence_parallel_region(each, group=self.tp_group, output_split_sizes=sizes)
                for each in (rows_RC, weights_R)
            )
        if self.is_divided and self.num_local_experts > 1:
            order = order_by_expert(self.counts_TL, len(rows_RC))
            self.order = order, inverse_of(order)
            rows_RC, weights_R = (_Permuted.apply(each, *self.order) for each in (rows_RC, weights_R))
        return rows_RC, self.counts, weights_R

    def combine_preprocess(self, rows_RC: Tensor) -> Tensor:
        if self.is_divided and self.num_local_experts > 1:
            rows_RC = _Permuted.apply(rows_RC, *reversed(self.order))
        if self.tp_size > 1:
            sizes, dtype = self.output_splits_tp.tolist(), rows_RC.dtype
            rows_RC = reduce_scatter_to_sequence_parallel_region(
                rows_RC.to(self.weights_dtype), group=self.tp_group, input_split_sizes=sizes
            ).to(dtype)
        return rows_RC

    def token_combine(self, rows_RC: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().token_combine(rows_RC, *args, **kwargs) if self.is_divided else rows_RC

    def combine_postprocess(self, rows_RC: Tensor) -> Tensor:
        """The sum of each token's rows, in the shape of the layer's input."""
        return _ToTokens.apply(rows_RC, self.places, self.sum_rows).view(self.hidden_shape)


class _ToRows(torch.autograd.Function):
    """Rows [R, C] of tokens [N, C], and weights [R] of weights [N, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, places: Places, sums: RowSums) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places.entries, places.rows)
        ctx.sums = sums
        return x.index_select(0, places.tokens), weights.flatten().index_select(0, places.entries)

    @staticmethod
    def backward(ctx: Any, grad_RC: Tensor, grad_R: Tensor) -> tuple:
        entry_R, row_NK = ctx.saved_tensors
        grad_x = ctx.sums(grad_RC, row_NK) if ctx.needs_input_grad[0] else None
        grad_weights = torch.empty_like(grad_R).scatter_(0, entry_R, grad_R).view(row_NK.shape)
        return grad_x, grad_weights, None, None


class _ToTokens(torch.autograd.Function):
    """Sums [N, C] of each token's rows [R, C]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places, sums: RowSums) -> Tensor:
        ctx.save_for_backward(places.tokens)
        return sums(rows, places.rows)

    @staticmethod
    def backward(ctx: Any, grad_NC: Tensor) -> tuple:
        return grad_NC.index_select(0, *ctx.saved_tensors), None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad.index_select(0, *ctx.saved_tensors), None, None
