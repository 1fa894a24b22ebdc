"""Models with random weights that benchmarks build: named shapes with the layers of Qwen3, and two tiny ones."""

from __future__ import annotations

from typing import Any

from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.families.gated_delta_net.sizes import Sizes
from megatron_dta.families.latent_attention import sizes as latent_attention
from megatron_dta.families.mamba2 import sizes as mamba2
from megatron_dta.families.named_shapes import SHAPES

# The tiny shapes are for trying things on a laptop; their vocabulary size follows from the data.
TINY = {
    "tiny": DecoderShape(2, 64, 192, 8, 8, 8, 1),
    "tiny-moe": DecoderShape(2, 64, 192, 8, 8, 8, 1, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48),
    "tiny-hybrid": DecoderShape(
        *(4, 64, 192, 4, 2, 16, 1),
        attention_output_gate=True,
        mixer_layers=(True, False) * 2,
        mixer=Sizes(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4),
    ),
}
TINY["tiny-mamba"] = DecoderShape(
    *(6, 64, 192, 4, 2, 16, 1),
    swiglu=False,
    mixer=mamba2.Sizes(mamba_num_heads=8, mamba_head_dim=16, mamba_state_dim=16, mamba_num_groups=2),
    hybrid_layer_pattern="MEM*-M",
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=64,
)
TINY["tiny-latent"] = DecoderShape(
    *(3, 64, 192, 4, 4, 24, 1),
    mixer=latent_attention.Sizes(
        num_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
    ),
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=48,
    moe_layers=(False, True, True),
)
_NAMES = ("qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "llama3-70b")
_NAMES += ("qwen3.5-9b", "qwen3.5-35b-a3b", "nemotron-3-nano-30b-a3b", "moonlight-16b-a3b", "deepseek-v3")
MODELS: dict[str, DecoderShape] = TINY | {name: SHAPES[name] for name in _NAMES}
# Settings taken from the shape; the others are those of all benchmarks.
_COPIED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    "vocab_size",
    *("swiglu", "untie_embeddings_and_output_weights", "num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
)


def benchmark_model(
    name: str,
    vocab_size: int | None,
    longest: int,
    bf16: bool,
    num_layers: int | None = None,
    fused_layer_impl: str = "auto",
) -> ModelConfig:
    """The model of ``MODELS[name]`` for sequences of up to ``longest`` tokens; ``num_layers`` None keeps all layers.

    Args:
        vocab_size: vocabulary size of a tiny model; the others have their own.
    """
    settings = settings_of(MODELS[name], num_layers)
    if name in TINY:
        settings["vocab_size"] = vocab_size
    return ModelConfig(**settings, max_position_embeddings=longest, bf16=bf16, fused_layer_impl=fused_layer_impl)


def settings_of(shape: DecoderShape, num_layers: int | None = None) -> dict[str, Any]:
    """The settings of a model of this shape with the layers of Qwen3; ``num_layers`` None keeps all layers."""
    settings = {field: getattr(shape, field) for field in _COPIED}
    settings |= dict(disable_bias_linear=True, qk_layernorm=True)
    if num_layers is not None:
        settings["num_layers"] = num_layers
    if shape.hybrid_layer_pattern is not None:
        return settings | _single_parts(shape, settings["num_layers"])
    if shape.mixer is None:
        return settings
    family = _latent if isinstance(shape.mixer, latent_attention.Sizes) else _hybrid
    return settings | family(shape, settings["num_layers"])


def _single_parts(shape: DecoderShape, num_layers: int) -> dict[str, object]:
    """The settings of Nemotron 3, for the first layers of a shape."""
    pattern = shape.hybrid_layer_pattern[:num_layers]
    settings = dict(mixer=shape.mixer, hybrid_layer_pattern=pattern, swiglu=False, squared_relu=True)
    settings |= dict(qk_layernorm=False, position_embedding_type="none", moe_layer_freq="1")
    if "E" not in pattern:
        return settings | dict(num_experts=None, moe_shared_expert_intermediate_size=None)
    return settings | dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5)


def _hybrid(shape: DecoderShape, num_layers: int) -> dict[str, object]:
    """The settings of gated delta net and gated attention, for the first layers of a shape."""
    layers = list(map(int, shape.mixer_layers[:num_layers]))
    return {
        "mixer": shape.mixer,
        "mixer_layer_freq": str(layers).replace(" ", ""),
        "attention_output_gate": shape.attention_output_gate,
        "apply_layernorm_1p": True,
        "rotary_percent": 0.25,
        "norm_epsilon": shape.norm_epsilon,
    }


def _latent(shape: DecoderShape, num_layers: int) -> dict[str, object]:
    """The settings of DeepSeek V3 without its extended positions, for the first layers of a shape."""
    experts = dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5)
    if not any(shape.moe_layers[:num_layers]):
        experts = dict(num_experts=None, moe_shared_expert_intermediate_size=None)
    layers = str(list(map(int, shape.moe_layers[:num_layers]))).replace(" ", "")
    return dict(mixer=shape.mixer, qk_layernorm=False, moe_layer_freq=layers) | experts
