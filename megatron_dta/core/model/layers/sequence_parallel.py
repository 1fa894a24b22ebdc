"""Norms for sequence parallelism, where every rank of a tensor group normalizes its part of the tokens.

Megatron's wrapper around PyTorch's norms refuses sequence parallelism, although only a mark on the weights is needed.
The gradient on a rank is that of its tokens, and Megatron sums marked gradients over the tensor group before the
update.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm:
    """Builds PyTorch's own RMSNorm or LayerNorm with marked weights; results equal those of one rank bit for bit."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm
