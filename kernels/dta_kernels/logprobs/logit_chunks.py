"""Computes one chunk of logits of ``linear_logprobs``, forward and backward: in plain PyTorch, and on fused kernels.

Legend: B rows and e edges of a chunk, V columns (the vocabulary, or a rank's share of it), C hidden size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from dta_kernels.invariant.products import product, row_sums
from dta_kernels.tree_attention.reference import accumulation_dtype


class Edges(NamedTuple):
    """Edges, sorted by row.

    Attributes:
        row, column: int64 [e].
        is_own: bool [e], which targets are among the rank's columns; the others name any column. None: all are.
    """

    row: Tensor
    column: Tensor
    is_own: Tensor | None = None

    def of(self, chunk: tuple[int, int, int, int]) -> Edges:
        """The edges of a ``RowChunk``, with rows counted within it."""
        row_begin, _, begin, end = chunk
        is_own = None if self.is_own is None else self.is_own[begin:end]
        return Edges(self.row[begin:end] - row_begin, self.column[begin:end], is_own)


class Head(NamedTuple):
    """The output weight of a rank and how its logits are rounded.

    Attributes:
        weight: [V, C].
        in_float32: logits of 16-bit inputs are not rounded to 16 bits.
    """

    weight: Tensor
    in_float32: bool = False

    def widens(self, hidden: Tensor) -> bool:
        """Whether the logits of ``hidden`` have another dtype than it."""
        return self.in_float32 and hidden.dtype.itemsize == 2

    def logits(self, hidden_BC: Tensor) -> Tensor:
        """``hidden @ weight.T`` [B, V]."""
        return product(hidden_BC, self.weight, torch.float32 if self.widens(hidden_BC) else None)


class RowStatistics(NamedTuple):
    """Statistics of rows over the whole vocabulary, [B] each; the log-sum-exp of a row is largest + log_mass."""

    largest: Tensor
    log_mass: Tensor
    entropy: Tensor


def uses_fused_kernels(hidden: Tensor) -> bool:
    """Whether Triton's kernels run by default: on a GPU, for float32 and 16-bit inputs."""
    return hidden.is_cuda and hidden.dtype != torch.float64 and find_spec("triton") is not None


def plain_moments(
    hidden_BC: Tensor, head: Head, edges: Edges, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(largest [B], mass [B], moment [B], target logits [e])``, see ``fused_logits.row_moments``.

    The logit of a target that is not the rank's is 0.
    """
    logits_BV = tempered_logits(hidden_BC, head, temperature)
    chosen_e = _own(logits_BV[edges.row, edges.column], edges)
    largest_B = logits_BV.amax(dim=-1)
    # In place, because allocation is the main cost.
    logits_BV -= largest_B[:, None]
    exp_BV = torch.exp(logits_BV)
    mass_B = row_sums(exp_BV)
    return largest_B, mass_B, row_sums(exp_BV.mul_(logits_BV)), chosen_e


def fused_moments(
    hidden_BC: Tensor, head: Head, edges: Edges, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``plain_moments`` on a fused kernel."""
    from dta_kernels.logprobs.fused_logits import row_moments

    logits_BV = head.logits(hidden_BC)
    chosen_e = logits_BV[edges.row, edges.column].float() * (1.0 / temperature)
    return *row_moments(logits_BV, temperature), _own(chosen_e, edges)


def plain_gradient(
    hidden_BC: Tensor, head: Head, edges: Edges, grad_edges_e: Tensor | None, grad_entropy_B: Tensor | None,
    statistics: RowStatistics, temperature: float,
) -> Tensor:  # fmt: skip
    """Gradient of the untempered logits, [B, V] in the inputs' dtype, rounded once.

    d logprob(target) / d logits = onehot(target) - p and d entropy / d logits = -p (logprob + entropy).
    """
    logprobs_BV = tempered_logits(hidden_BC, head, temperature)
    logprobs_BV -= statistics.largest[:, None]
    logprobs_BV -= statistics.log_mass[:, None]
    row_sum_B = _row_sums(grad_edges_e, edges, statistics.entropy)
    if grad_entropy_B is None:
        grad_logits_BV = logprobs_BV.exp_().mul_(-row_sum_B[:, None])
    else:
        grad_logits_BV = torch.exp(logprobs_BV)
        logprobs_BV.add_(statistics.entropy[:, None]).mul_(-grad_entropy_B[:, None]).sub_(row_sum_B[:, None])
        grad_logits_BV.mul_(logprobs_BV)
    if grad_edges_e is not None:
        # The children of one token are different tokens and other ranks' targets add zeros, so the order of additions
        # does not matter.
        grad_logits_BV.index_put_((edges.row, edges.column), _own(grad_edges_e, edges), accumulate=True)
    return grad_logits_BV.div_(temperature).to(hidden_BC.dtype)


def fused_gradient(
    hidden_BC: Tensor, head: Head, edges: Edges, grad_edges_e: Tensor | None, grad_entropy_B: Tensor | None,
    statistics: RowStatistics, temperature: float,
) -> Tensor:  # fmt: skip
    """``plain_gradient`` on a fused kernel."""
    from dta_kernels.logprobs.fused_logits import logit_gradient

    B, V = hidden_BC.shape[0], head.weight.shape[0]
    # An additional row receives the writes for targets that are not among these columns.
    padded = hidden_BC.new_empty((B + 1, V))
    if head.widens(hidden_BC):
        logits_BV = head.logits(hidden_BC)
    else:  # the gradient takes the place of the logits
        logits_BV = torch.mm(hidden_BC, head.weight.t(), out=padded[:B])
    row_sum_B = _row_sums(grad_edges_e, edges, statistics.entropy)
    if grad_edges_e is not None:
        # Gradients of targets are computed separately, before the logits are overwritten, to round p - 1 only once.
        largest_e, log_mass_e, entropy_e = (statistic[edges.row] for statistic in statistics)
        logprob = logits_BV[edges.row, edges.column].float() * (1.0 / temperature) - largest_e - log_mass_e
        factor = row_sum_B[edges.row]
        if grad_entropy_B is not None:
            factor = factor + grad_entropy_B[edges.row] * (logprob + entropy_e)
        of_targets = (grad_edges_e - logprob.exp() * factor) / temperature
    logit_gradient(logits_BV, padded[:B], temperature, statistics, row_sum_B, grad_entropy_B)
    if grad_edges_e is not None:
        row = edges.row if edges.is_own is None else torch.where(edges.is_own, edges.row, B)
        # The children of one token are different tokens, so every own (row, target) occurs once.
        padded[row, edges.column] = of_targets.to(padded.dtype)
    return padded[:B]


def tempered_logits(hidden_BC: Tensor, head: Head, temperature: float) -> Tensor:
    """``logits / temperature`` [B, V] in at least float32."""
    return head.logits(hidden_BC).to(accumulation_dtype(hidden_BC.dtype)).div_(temperature)


def _own(values_e: Tensor, edges: Edges) -> Tensor:
    """The values, 0 where the target is another rank's."""
    return values_e if edges.is_own is None else torch.where(edges.is_own, values_e, 0)


def _row_sums(grad_edges_e: Tensor | None, edges: Edges, like_B: Tensor) -> Tensor:
    """Sum of each row's edge gradients; edges are sorted by row, so it is over a run and in a fixed order."""
    if grad_edges_e is None:
        return torch.zeros_like(like_B)
    bounds = torch.arange(like_B.shape[0] + 1, device=edges.row.device)
    lengths = torch.searchsorted(edges.row, bounds).diff()
    return torch.segment_reduce(grad_edges_e, "sum", lengths=lengths, unsafe=True)
