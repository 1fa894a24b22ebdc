"""Attention whose output is gated, and norms whose weights are deviations from one, as in Qwen3-Next and Qwen3.5.

The gate of each query head comes from the query projection; Megatron puts its rows after the queries of a group
(``attention_output_gate``). Megatron computes the gate in float32 for models of every precision, and PyTorch's norms
refuse weights around zero (``layernorm_zero_centered_gamma``), so both are here.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dta_kernels.tree_attention.reference import accumulation_dtype


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention with a gate in at least float32."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = accumulation_dtype(x.dtype)
        return (x.to(dtype) * gate.reshape(x.shape).to(dtype).sigmoid()).to(x.dtype)


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm with the factor ``1 + weight``; takes Megatron's arguments.

    Under sequence parallelism its weight is marked, see ``layers.sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normed ``x`` [..., hidden size]."""
        dtype = accumulation_dtype(x.dtype)
        wide = x.to(dtype)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.to(dtype))).to(x.dtype)
