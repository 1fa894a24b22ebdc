"""A transformer layer on fused kernels: residual additions are fused with the norms, and SwiGLU is one kernel.

Per token, a layer keeps its input, the mixed QKV, the attention's output, the residual stream after it, and the first
product of the feed-forward layer. The rest is recomputed in the backward (``rematerialize``). Parameters, linear layers
and their communication are Megatron's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from dta_kernels.experts.row_order import order_rows
from dta_kernels.experts.row_sums import sum_rows
from dta_kernels.layers.swiglu import swiglu, swiglu_into
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.activation import is_swiglu
from megatron_dta.core.model.attention.context import AttentionContext, check_context
from megatron_dta.core.model.decode.decode_layer import DecodeLayer
from megatron_dta.core.model.decode.paged_context import PagedContext
from megatron_dta.core.model.experts.fused_experts import FusedGroupedExperts
from megatron_dta.core.model.experts.grouped_experts import GroupedExperts
from megatron_dta.core.model.experts.routed_layer import RoutedLayer
from megatron_dta.core.model.experts.spec import replace_experts
from megatron_dta.core.model.hybrid.gated_attention import GatedSelfAttention
from megatron_dta.core.model.layers.fused_attention import FusedSelfAttention
from megatron_dta.core.model.layers.fused_autograd_layer import FusedAutogradLayer, has_plain_modules, is_plain
from megatron_dta.core.model.layers.fused_norm import FusedRMSNorm, FusedZeroCenteredRMSNorm
from megatron_dta.core.model.layers.rematerialize import call_without_keeping_input, mark_recomputable


def fuse_layers(spec: TransformerBlockSubmodules, model: ModelConfig) -> None:
    """Put the fused modules into the spec of a block wherever they compute the same as Megatron's modules.

    LayerNorm and experts that are not grouped stay Megatron's; layers with such experts get the fused norms and the
    fused attention.
    """
    has_fused_norm = model.normalization == "RMSNorm"
    norm = FusedZeroCenteredRMSNorm if model.apply_layernorm_1p else FusedRMSNorm
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is SelfAttention:
            attention.module = FusedSelfAttention
        if has_fused_norm:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if attention.module is GatedSelfAttention and model.qk_layernorm and has_fused_norm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
        if layer.module is TransformerLayer:
            layer.module = FusedLayer
        elif layer.module is RoutedLayer:
            layer.module = FusedRoutedLayer
        replace_experts(layer, GroupedExperts, FusedGroupedExperts)
    if has_fused_norm:
        spec.layer_norm = norm


class FusedLayer(TransformerLayer):
    """Megatron's layer without dropout; in the plain case it runs as a ``FusedAutogradLayer``."""

    direct: FusedAutogradLayer | None = None
    decoding: DecodeLayer | None = None
    # Megatron's looks for CUDA graphs of its own first, and there are none.
    __call__ = torch.nn.Module.__call__

    @property
    def decodes_directly(self) -> bool:
        """Whether ``decode_layer`` supports the layer in passes over pages."""
        if self.decoding is None and is_swiglu(self.config) and has_plain_modules(self):
            self.decoding = DecodeLayer(self)
        return self.decoding is not None and self.decoding.is_free

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: object = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Output [n, 1, hidden size] of the layer, and None for the context of a cross-attention."""
        context = check_context(packed_seq_params)
        if isinstance(context, PagedContext) and context.direct_until is not None:
            return self.decoding(hidden_states, context), None
        # Gradient buffers are created after the layer; the layer is complete once they exist.
        if self.direct is None and is_swiglu(self.config) and is_plain(self):
            self.direct = FusedAutogradLayer(self)
        if self.direct is not None and self.direct.takes(hidden_states, context):
            return self.direct(hidden_states, context), None
        residual, branch = hidden_states, None
        # A layer may have one of the two parts only.
        if not isinstance(self.self_attention, IdentityOp):
            normed, residual = _normed(self.input_layernorm, hidden_states)
            branch = self.self_attention(
                normed, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
            )
        if not isinstance(self.mlp, IdentityOp):
            added = None if branch is None else _with_bias(branch)
            normed, residual = _normed(self.pre_mlp_layernorm, residual, added)
            branch = self._feed_forward(normed, context)
        return residual + _with_bias(branch), None

    def _feed_forward(self, normed: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        return feed_forward(self.mlp, normed)


class FusedRoutedLayer(FusedLayer):
    """The same with experts, whose rows are ordered and added up on the kernels."""

    decodes_directly = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.mlp.sum_rows, self.mlp.order_rows = sum_rows, order_rows

    def _feed_forward(self, normed: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        self.mlp.begin(context)
        return self.mlp(normed)


def feed_forward(mlp: MLP, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output and bias of Megatron's ``mlp``; uses the SwiGLU kernel if SwiGLU is its activation."""
    if not is_swiglu(mlp.config):
        return call_without_keeping_input(mlp, hidden_states)
    gated = _with_bias(call_without_keeping_input(mlp.linear_fc1, hidden_states))
    active = mark_recomputable(swiglu(gated), partial(swiglu_into, gated.detach()))
    return call_without_keeping_input(mlp.linear_fc2, active)


def _normed(norm: torch.nn.Module, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(normed, residual)`` of ``x``, or of ``x + added``."""
    if isinstance(norm, FusedRMSNorm):
        return norm.with_residual(x, added)
    residual = x if added is None else x + added
    return norm(residual), residual


def _with_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
    """A linear layer's output plus the bias whose addition it left to its caller."""
    value, bias = output
    return value if bias is None else value + bias
