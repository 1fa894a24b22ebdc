"""Computes one chunk of logits of ``linear_logprobs`` on the fused kernels, forward and backward.

Legend: B rows and e edges of a chunk, V columns (the vocabulary, or a rank's part of it), C hidden size.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def uses_fused_kernels(hidden: Tensor) -> bool:
    """Whether Triton's kernels run by default: on a GPU, for float32 and 16-bit inputs."""
    return hidden.is_cuda and hidden.dtype != torch.float64 and find_spec("triton") is not None


def fused_statistics(
    hidden_BC: Tensor, weight_VC: Tensor, edge_row_e: Tensor, column_e: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(largest [B], mass [B], moment [B], target logits [e])``, see ``fused_logits.row_moments``."""
    from dta_kernels.logprobs.fused_logits import row_moments

    logits_BV = hidden_BC @ weight_VC.t()
    return *row_moments(logits_BV, temperature), logits_BV[edge_row_e, column_e].float() * (1.0 / temperature)


def fused_gradient(
    hidden_BC: Tensor,
    weight_VC: Tensor,
    edge_row_e: Tensor,
    column_e: Tensor,
    is_own_e: Tensor | None,
    grad_edges_e: Tensor | None,
    grad_entropy_B: Tensor | None,
    largest_B: Tensor,
    log_mass_B: Tensor,
    entropy_B: Tensor,
    temperature: float,
) -> Tensor:
    """Gradient by the untempered logits, [B, V] in the inputs' dtype, rounded once.

    ``is_own_e`` says which targets are among these columns; the others name any column.
    """
    from dta_kernels.logprobs.fused_logits import gradient_in_place

    B, V = hidden_BC.shape[0], weight_VC.shape[0]
    # An additional row receives the writes for targets that are not among these columns.
    padded = hidden_BC.new_empty((B + 1, V))
    logits_BV = padded[:B]
    torch.mm(hidden_BC, weight_VC.t(), out=logits_BV)
    factor_B = torch.zeros_like(entropy_B)
    if grad_edges_e is not None:
        bounds = torch.arange(B + 1, device=edge_row_e.device)
        lengths = torch.searchsorted(edge_row_e, bounds).diff()
        factor_B = torch.segment_reduce(grad_edges_e, "sum", lengths=lengths, unsafe=True)
        # Gradients of targets are computed separately, before the logits are overwritten, to round p - 1 only once.
        chosen = logits_BV[edge_row_e, column_e].float() * (1.0 / temperature)
        logprob = chosen - largest_B[edge_row_e] - log_mass_B[edge_row_e]
        factor = factor_B[edge_row_e]
        if grad_entropy_B is not None:
            factor = factor + grad_entropy_B[edge_row_e] * (logprob + entropy_B[edge_row_e])
        of_targets = (grad_edges_e - logprob.exp() * factor) / temperature
    gradient_in_place(logits_BV, temperature, largest_B, log_mass_B, factor_B, entropy_B, grad_entropy_B)
    if grad_edges_e is not None:
        row = edge_row_e if is_own_e is None else torch.where(is_own_e, edge_row_e, B)
        # The children of one token are different tokens, so every own (row, target) occurs once.
        padded[row, column_e] = of_targets.to(padded.dtype)
    return logits_BV
