"""Shapes of published models by name. Other shapes come from a config.json or from flags."""

from __future__ import annotations

from typing import Any

from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.families.gated_delta_net import sizes as gated_delta_net
from megatron_dta.families.latent_attention import sizes as latent_attention
from megatron_dta.families.mamba2 import sizes as mamba2

_QWEN3 = dict(
    vocab_size=151936, kv_channels=128, num_query_groups=8, qk_layernorm=True, norm_epsilon=1e-6, rotary_base=1e6
)
_QWEN3_EXPERTS = _QWEN3 | dict(num_query_groups=4, num_experts=128, moe_router_topk=8)
_QWEN25 = dict(vocab_size=152064, kv_channels=128, num_query_groups=8, add_qkv_bias=True, rotary_base=1e6)
_LLAMA31 = dict(vocab_size=128256, kv_channels=128, num_query_groups=8, rotary_base=5e5, use_rope_scaling=True)
# 3 layers of gated delta net for each with attention.
_QWEN35 = dict(
    vocab_size=248320,
    kv_channels=256,
    qk_layernorm=True,
    attention_output_gate=True,
    norm_epsilon=1e-6,
    rotary_base=1e7,
    mixer=gated_delta_net.Sizes(),
)
_QWEN35_EXPERTS = _QWEN35 | dict(
    num_query_groups=2,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
)
_NAMES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")


def _shape(family: dict[str, Any], *sizes: int, **more: Any) -> DecoderShape:
    return DecoderShape(**family | dict(zip(_NAMES, sizes, strict=True)) | more)


SHAPES: dict[str, DecoderShape] = {
    "qwen3-0.6b": _shape(_QWEN3, 28, 1024, 3072, 16, untie_embeddings_and_output_weights=False),
    "qwen3-1.7b": _shape(_QWEN3, 28, 2048, 6144, 16, untie_embeddings_and_output_weights=False),
    "qwen3-8b": _shape(_QWEN3, 36, 4096, 12288, 32),
    "qwen3-14b": _shape(_QWEN3, 40, 5120, 17408, 40),
    "qwen3-32b": _shape(_QWEN3, 64, 5120, 25600, 64),
    "qwen3-30b-a3b": _shape(_QWEN3_EXPERTS, 48, 2048, 6144, 32, moe_ffn_hidden_size=768),
    "qwen3-235b-a22b": _shape(_QWEN3_EXPERTS, 94, 4096, 12288, 64, moe_ffn_hidden_size=1536),
    "qwen3.5-9b": _shape(
        _QWEN35, *(32, 4096, 12288, 16), num_query_groups=4, mixer_layers=(True, True, True, False) * 8
    ),
    "qwen3.5-35b-a3b": _shape(
        _QWEN35_EXPERTS,
        *(40, 2048, 512, 16),
        mixer_layers=(True, True, True, False) * 10,
        num_experts=256,
        moe_router_topk=8,
    ),
    "qwen3-next-80b-a3b": _shape(
        _QWEN35_EXPERTS | dict(vocab_size=151936),
        *(48, 2048, 512, 16),
        mixer_layers=(True, True, True, False) * 12,
        num_experts=512,
        moe_router_topk=10,
    ),
    "moonlight-16b-a3b": _shape(
        dict(kv_channels=192),
        *(27, 2048, 11264, 16),
        num_query_groups=16,
        vocab_size=163840,
        mixer=latent_attention.Sizes(num_heads=16),
        num_experts=64,
        moe_router_topk=6,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2816,
        moe_layers=(False,) + (True,) * 26,
        norm_epsilon=1e-5,
        rotary_base=5e4,
    ),
    "deepseek-v3": _shape(
        dict(kv_channels=192),
        *(61, 7168, 18432, 128),
        num_query_groups=128,
        vocab_size=129280,
        mixer=latent_attention.Sizes(q_lora_rank=1536),
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layers=(False,) * 3 + (True,) * 58,
        num_experts=256,
        moe_router_topk=8,
        norm_epsilon=1e-6,
    ),
    "nemotron-3-nano-30b-a3b": DecoderShape(
        *(52, 2688, 1856, 32, 2, 128, 131072),
        swiglu=False,
        mixer=mamba2.Sizes(mamba_num_heads=64),
        hybrid_layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        num_experts=128,
        moe_router_topk=6,
        moe_ffn_hidden_size=1856,
        moe_shared_expert_intermediate_size=3712,
    ),
    "qwen2.5-7b": _shape(_QWEN25 | dict(num_query_groups=4, norm_epsilon=1e-6), 28, 3584, 18944, 28),
    "qwen2.5-32b": _shape(_QWEN25, 64, 5120, 27648, 40),
    "qwen2.5-72b": _shape(_QWEN25, 80, 8192, 29568, 64),
    "llama3-8b": _shape(_LLAMA31, 32, 4096, 14336, 32),
    "llama3-70b": _shape(_LLAMA31, 80, 8192, 28672, 64),
}
# Checkpoints of the named shapes on the Hugging Face hub.
HUB_NAMES = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B",
    "deepseek-v3": "unsloth/DeepSeek-V3-bf16",  # deepseek-ai's own weights are FP8
    "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B",
    "llama3-8b": "meta-llama/Llama-3.1-8B",
    "llama3-70b": "meta-llama/Llama-3.1-70B",
}
