"""Layers with one part: a norm, then attention, another mixer, a feed-forward part or experts, and the residual."""

from __future__ import annotations

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec


def keep_one_part(spec: ModuleSpec, letter: str) -> None:
    """Remove the other part from a complete layer's spec; ``letter`` as in ``hybrid_layer_pattern``."""
    parts = spec.submodules
    if letter in "M*":
        parts.pre_mlp_layernorm = parts.mlp = IdentityOp
        parts.mlp_bda = IdentityFuncOp
    else:
        parts.input_layernorm = parts.self_attention = IdentityOp
        parts.self_attn_bda = IdentityFuncOp
