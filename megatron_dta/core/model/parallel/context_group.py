"""Divides the tokens of a segment over the ranks of a context group, and its heads for the attention.

Outside the attention, a rank computes a contiguous share of a segment's tokens with all the heads of its tensor rank.
Inside the attention it computes all tokens with its share of the heads, so K and V of these heads are all that it
stores. Two exchanges in each layer change from one division to the other and back: queries, keys and values before the
attention, its output after it (DeepSpeed-Ulysses, arXiv:2309.14509). Nothing is summed in them. The gradients of the
weights are sums over tokens; Megatron adds them over the data-parallel and the context ranks.

If there are fewer key/value heads than ranks, each is repeated for the ranks that share its query heads. Each of them
stores its K and V, and the gradients that they compute are added up after the exchange.

Every share has the same number of rows, so the last ones may end in padding, or consist of padding alone.

Legend: R rank's rows, N = R x ranks rows of the pass, P query heads and G key/value heads of the tensor rank (P' and G'
of the context rank), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup


class ContextGroup(NamedTuple):
    """The ranks that divide the tokens of a segment, in the order of their shares; there are at least two.

    All of them must call the exchanges of a pass in the same order.
    """

    group: ProcessGroup
    rank: int
    size: int

    def own_rows(self, tensor: Tensor) -> Tensor:
        """The rank's rows [..., R] of ``tensor`` [..., N]."""
        rows = tensor.shape[-1] // self.size
        return tensor.narrow(-1, self.rank * rows, rows)

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """All rows of the rank's heads, [N, heads / ranks, D] for each [R, heads, D] of ``parts``, in one exchange.

        The results are views of one buffer.
        """
        rows, size = parts[0].shape[0], self.size
        heads = [part.shape[1] // size for part in parts]
        sent = parts[0].new_empty(size, rows, sum(heads), parts[0].shape[2])
        for target, part in zip(sent.split(heads, dim=2), parts, strict=True):
            target.copy_(part.unflatten(1, (size, -1)).transpose(0, 1))
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=self.group)
        return received.flatten(0, 1).split(heads, dim=1)

    def repeated(self, part: Tensor) -> Tensor:
        """Key/value heads [R, heads, D], repeated if they are fewer than the ranks."""
        copies = self.size // part.shape[1]
        return part if copies <= 1 else part.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2)

    def summed(self, part: Tensor, heads: int) -> Tensor:
        """The sums over the copies of ``repeated``, [R, heads, D]."""
        return part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(2)

    def to_rows(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The reverse of ``to_heads``: the rank's rows of all heads, [R, heads, D], contiguous."""
        size, heads = self.size, [part.shape[1] for part in parts]
        sent = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=self.group)
        by_rank = received.view(size, -1, *sent.shape[1:]).transpose(0, 1).split(heads, dim=2)
        return tuple(part.reshape(part.shape[0], -1, part.shape[-1]) for part in by_rank)

    def joined(self, local: Sequence[Tensor], begins: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Tensors of these ``lengths`` of which every rank has the rows ``local`` from ``begins`` on; the same bits on
        every rank.
        """
        values = local[0].new_zeros(sum(lengths), *local[0].shape[1:])
        joined = values.split(list(lengths))
        for target, part, begin in zip(joined, local, begins, strict=True):
            target[begin : begin + part.shape[0]] = part.detach()
        # Adding zeros changes no value, so the order of the sum does not matter.
        torch.distributed.all_reduce(values, group=self.group)
        return joined


def context_group() -> ContextGroup | None:
    """This rank's context group; None if it has only this rank."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return None
    return ContextGroup(parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank(), size)


class ToHeads(torch.autograd.Function):
    """``ContextGroup.to_heads``; the gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        # A result that is a view of a shared buffer would be copied at its first change anyway.
        return tuple(part.contiguous() for part in group.to_heads(*parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return None, *ctx.group.to_rows(*grads)


class ToRows(torch.autograd.Function):
    """``ContextGroup.to_rows`` of one tensor; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, part: Tensor) -> Tensor:
        ctx.group = group
        return group.to_rows(part)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return None, ctx.group.to_heads(grad)[0].contiguous()
