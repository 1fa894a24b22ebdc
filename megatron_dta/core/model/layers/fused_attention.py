"""Self-attention with one kernel between the mixed QKV and the core attention: QK-norm and rotary positions.

The backward keeps the mixed rows, the attention's output and its log-sum-exp. The input of the QKV product and the
rotated queries are recomputed (``rematerialize``).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from dta_kernels.layers.qkv_rope import MixedQKV, QKVLayout, qkv_rope
from megatron_dta.core.model.attention.context import check_context
from megatron_dta.core.model.layers.rematerialize import call_without_keeping_input, empty_until_backward


class FusedSelfAttention(SelfAttention):
    """Megatron's self-attention with the same submodules; unsupported cases fall back to Megatron's forward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = self.num_query_groups_per_partition
        self.layout = QKVLayout(
            groups, self.num_attention_heads_per_partition // groups, self.hidden_size_per_attention_head
        )
        norms = (self.q_layernorm, self.k_layernorm)
        self.has_norms = all(isinstance(norm, torch.nn.RMSNorm) for norm in norms)
        config = self.config
        self.is_fused = (
            (self.has_norms or not config.qk_layernorm)
            and config.num_query_groups % self.world_size == 0
            and not config.rotary_interleaved
            and not config.attention_output_gate
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: object = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [n, 1, hidden size] and bias of the attention over ``hidden_states`` [n, 1, hidden size]."""
        context = check_context(packed_seq_params)
        if not self.is_fused or context.rotary_tables is None:
            return super().forward(hidden_states, attention_mask, *args, packed_seq_params=context, **kwargs)
        mixed = call_without_keeping_input(self.linear_qkv, hidden_states)[0].flatten(0, 1)
        weights = (self.q_layernorm.weight, self.k_layernorm.weight) if self.has_norms else (None, None)
        eps = self.q_layernorm.eps if self.has_norms else 0.0
        rows = MixedQKV(mixed, *context.rotary_tables, *weights, self.layout, eps)
        query, key, value = qkv_rope(rows)
        heads = (query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(*heads, attention_mask, packed_seq_params=context)
        else:
            out = self.core_attention(
                *heads, attention_mask, attn_mask_type=self.attn_mask_type, packed_seq_params=context
            )
        if context.context_group is None:
            # Otherwise the attention keeps the exchanged queries.
            empty_until_backward(query, out, rows._replace(mixed=mixed.detach()).write)
        return self.linear_proj(out)
