"""RMSNorm on the fused kernels, with the same parameter as in PyTorch and Megatron."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dta_kernels.layers.rms_norm import rms_norm, rms_norm_again
from megatron_dta.core.model.layers.rematerialize import mark_recomputable


class FusedRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose output can be recomputed from its input (``rematerialize``); takes Megatron's arguments.

    Under sequence parallelism its weight is marked, see ``SequenceParallelNorm``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        """Normed ``x`` [..., hidden size]."""
        return self.with_residual(x)[0]

    @property
    def factor(self) -> Tensor:
        """Factor on the normed values, [hidden size]."""
        return self.weight

    def with_residual(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(normed, residual)`` of ``x``, or of ``x + added``; use the residual in place of the input afterwards."""
        factor = self.factor
        normed, residual, rstd = rms_norm(x, factor, self.eps, added)
        again = partial(rms_norm_again, residual.detach(), rstd, factor.detach())
        return mark_recomputable(normed, again), residual


class FusedZeroCenteredRMSNorm(FusedRMSNorm):
    """``FusedRMSNorm`` with the factor ``1 + weight``, in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        torch.nn.init.zeros_(self.weight)

    @property
    def factor(self) -> Tensor:
        return 1 + self.weight.float()
