"""Megatron's latent latent attention, one sequence in one forward, autograd for everything."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.families.latent_attention.layer import LATENT_NORM_EPSILON, LatentSubmodules


class _CoreAttention(DotProductAttention):
    """Megatron's core attention, which takes sizes of keys and values with Transformer Engine only."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class _Angles(torch.nn.Module):
    """The angles that the model computes, in place of the layer's latent."""

    angles: Tensor

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def get_rotary_seq_len(self, *_: object) -> int:
        return 0

    def forward(self, *_: object, **__: object) -> tuple[Tensor, float]:
        return self.angles, self.factor


class Plain(MLASelfAttention):
    """Latent attention for a forward over one whole sequence, in the precision of its parameters."""

    def __init__(
        self, config: TransformerConfig, submodules: LatentSubmodules, layer_number: int, **options: Any
    ) -> None:
        megatron_patches.build_latent_attention_without_transformer_engine()
        latent = copy.copy(config)
        sizes = config.mixer
        latent.multi_latent_attention, latent.cache_mla_latents, latent.rope_type = True, False, "yarn"
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            setattr(latent, name, getattr(sizes, name))
        # They decide the scale of the scores only.
        latent.rotary_scaling_factor = getattr(config, "yarn_rotary_scaling_factor", 1.0)
        latent.mscale_all_dim = getattr(config, "yarn_mscale_all_dim", 0.0)
        latent.mscale, latent.rotary_base = 1.0, 10000.0
        latent.original_max_position_embeddings, latent.beta_fast, latent.beta_slow = 4096, 32.0, 1.0
        # Megatron's core attention derives the width of its output from this.
        latent.kv_channels = sizes.v_head_dim
        parts = MLASelfAttentionSubmodules(**vars(submodules), core_attention=_CoreAttention)
        super().__init__(latent, parts, layer_number, **options)
        self.rotary_pos_emb = _Angles(_yarn_get_concentration_factor_from_config(config))
        for norm in (self.kv_layernorm, getattr(self, "q_layernorm", None)):
            if norm is not None:
                norm.eps = LATENT_NORM_EPSILON

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, *, rotary_pos_emb: Tensor, **_: Any) -> tuple:
        """Output and bias for one sequence."""
        self.rotary_pos_emb.angles = rotary_pos_emb
        return super().forward(hidden_states, attention_mask)
