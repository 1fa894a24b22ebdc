"""Replaces Megatron's core attention through the layer spec.

It has no parameters and no mask: it reshapes its inputs and calls the ``AttentionContext`` of the pass. Linear layers,
QK-norm, rotary embedding and everything else stay Megatron's.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dta.core.model.attention.context import check_context
from megatron_dta.core.model.parallel.context_group import ToHeads, ToRows


class TreeAttention(MegatronModule):
    """Core attention over ``[n, 1, heads, head size]``; the arguments are those of Megatron's
    ``DotProductAttention``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"tree attention is self-attention, got attention_type={attention_type!r}")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
        **_: object,
    ) -> Tensor:
        context = check_context(packed_seq_params)
        parts, n = tuple(tensor.squeeze(1) for tensor in (query, key, value)), context.position_ids.shape[0]
        # A pass over no tokens has nothing to exchange.
        group = context.context_group if n else None
        if group is not None:
            parts = ToHeads.apply(group, parts[0], group.repeated(parts[1]), group.repeated(parts[2]))
        # Padding tokens of sequence and context parallelism attend to nothing, and no token attends to them.
        padded = parts[0].shape[0]
        query, key, value = (part[:n] for part in parts)
        out = context.attend(self.layer_number, query, key, value, self.softmax_scale)
        out = F.pad(out, (0, 0, 0, 0, 0, padded - n)) if padded > n else out
        if group is not None:
            out = ToRows.apply(group, out)
        return out.flatten(1).unsqueeze(1)
