"""Named shapes of models that benchmarks build with random weights, in Megatron's terms."""

from __future__ import annotations

from typing import Any

from megatron_dta.config import ModelConfig

_QWEN3 = dict(vocab_size=151936, kv_channels=128, num_query_groups=8, untie_embeddings_and_output_weights=True)
# "tiny" and "tiny-moe" are for trying things on a laptop; their vocabulary size follows from the data.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3
    | dict(num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=8, kv_channels=8, vocab_size=None),
    "tiny-moe": _QWEN3
    | dict(num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=8, kv_channels=8, vocab_size=None)
    | dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48),
    "qwen3-1.7b": _QWEN3
    | dict(
        num_layers=28,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=16,
        untie_embeddings_and_output_weights=False,
    ),
    "qwen3-8b": _QWEN3 | dict(num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32),
    "qwen3-14b": _QWEN3 | dict(num_layers=40, hidden_size=5120, ffn_hidden_size=17408, num_attention_heads=40),
    "qwen3-32b": _QWEN3 | dict(num_layers=64, hidden_size=5120, ffn_hidden_size=25600, num_attention_heads=64),
    "qwen3-30b-a3b": _QWEN3
    | dict(num_layers=48, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32, num_query_groups=4)
    | dict(num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768),
    "llama3-70b": _QWEN3
    | dict(num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, vocab_size=128256),
}


def benchmark_model(
    name: str,
    vocab_size: int | None,
    longest: int,
    bf16: bool,
    num_layers: int | None = None,
    fused_layer_impl: str = "auto",
) -> ModelConfig:
    """The model of ``SHAPES[name]`` for sequences of up to ``longest`` tokens; ``num_layers`` None keeps all layers."""
    shape = dict(SHAPES[name])
    if num_layers is not None:
        shape["num_layers"] = num_layers
    shape["vocab_size"] = shape["vocab_size"] or vocab_size
    return ModelConfig(
        **shape,
        group_query_attention=True,
        swiglu=True,
        disable_bias_linear=True,
        qk_layernorm=True,
        max_position_embeddings=longest,
        bf16=bf16,
        fused_layer_impl=fused_layer_impl,
    )
