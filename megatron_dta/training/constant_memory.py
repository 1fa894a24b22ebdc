"""Bytes of a rank that stay the same through a step: weights, gradients, optimizer states."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Adam's two moments in float32, and master weights beside weights of another dtype.
_MOMENTS, _MASTER = 8, 4


def constant_bytes(parts: Iterable[torch.nn.Module], has_optimizer: bool = True, optimizer_ranks: int = 1) -> float:
    """Bytes of the model's parts on this rank.

    Args:
        parts: of one model, in Megatron's gradient buffers if it is trained.
        has_optimizer: whether Adam's states belong to it.
        optimizer_ranks: data-parallel ranks that divide them (``--use-distributed-optimizer``), else 1.
    """
    total = 0.0
    for part in parts:
        for parameter in part.parameters():
            count = parameter.numel()
            total += count * parameter.element_size()
            if not parameter.requires_grad:
                continue
            gradient = getattr(parameter, "main_grad", None)
            total += count * (parameter if gradient is None else gradient).element_size()
            if has_optimizer:
                own = parameter.dtype in (torch.float32, torch.float64)
                state = 2 * parameter.element_size() if own else _MOMENTS + _MASTER
                total += count * state / optimizer_ranks
    return total
