"""Attention of packed rows for transformers where flash-attn 2 is not installed.

Importing this module registers two values of ``attn_implementation``: "packed_fa4" is FlashAttention 4
(flash_attn.cute), "packed_fa2" the FlashAttention 2 inside PyTorch. In verl's workers
VERL_USE_EXTERNAL_MODULES=common.packed_attention imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import flash_attention_mask

Kernel = Callable[[list[Tensor], Tensor, int, float | None], Tensor]


def flash_attention_4(rows: list[Tensor], bounds: Tensor, longest: int, scaling: float | None) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        *rows, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scaling, causal=True,
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


def flash_attention_2(rows: list[Tensor], bounds: Tensor, longest: int, scaling: float | None) -> Tensor:
    flash = torch.ops.aten._flash_attention_forward
    return flash(*rows, bounds, bounds, longest, longest, 0.0, True, False, scale=scaling)[0]


def register(name: str, kernel: Kernel) -> None:
    """Let transformers find ``kernel`` under this name."""

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        scaling: float | None = None,
        position_ids: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Causal attention [1, tokens, heads, D] of rows one after the other, each with positions from 0.

        transformers passes the longest length as a tensor, which the kernels refuse.
        """
        positions = position_ids.reshape(-1)
        starts = torch.nonzero(positions == 0).flatten().int()
        bounds = torch.cat([starts, starts.new_tensor([len(positions)])])
        rows = [tensor[0].transpose(0, 1).to(torch.bfloat16) for tensor in (query, key, value)]
        return kernel(rows, bounds, int(positions.max()) + 1, scaling)[None].to(query.dtype), None

    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, flash_attention_mask)


register("packed_fa4", flash_attention_4)
register("packed_fa2", flash_attention_2)
