"""config.json of DeepSeek V3 and Moonlight: the named shapes, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from latent_cases import LATENT, SIZES
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.build import transformer_config
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.families.named_shapes import SHAPES
from megatron_dta.training.huggingface.config.config import model_settings
from tree_engine_cases import model_config

DEEPSEEK: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432,
    num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, vocab_size=129280, n_routed_experts=256,
    num_experts_per_tok=8, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
    rope_scaling=dict(type="yarn", factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096),
)  # fmt: skip
MOONLIGHT = DEEPSEEK | dict(
    hidden_size=2048, intermediate_size=11264, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
    vocab_size=163840, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408,
    first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=None, rms_norm_eps=1e-5, rope_theta=50000.0,
    routed_scaling_factor=2.446, rope_scaling=None, auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
)  # fmt: skip


@pytest.mark.parametrize(("name", "config"), [("deepseek-v3", DEEPSEEK), ("moonlight-16b-a3b", MOONLIGHT)])
def test_published_sizes_are_the_named_ones(name: str, config: dict) -> None:
    settings = model_settings(config)
    assert DecoderShape.of(ModelConfig(**settings)) == SHAPES[name]
    assert round(SHAPES[name].num_parameters / 1e9, 1) == {"deepseek-v3": 671.0, "moonlight-16b-a3b": 16.0}[name]
    assert settings["moe_router_bias_update_rate"] == 0.0
    queries = ("linear_q_proj",) if name.startswith("moonlight") else ("linear_q_down_proj", "linear_q_up_proj")
    of_attention = *queries, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"
    assert ModelConfig(**settings).lora_targets == (*of_attention, "linear_fc1", "linear_fc2")


REFUSED = [
    (dict(quantization_config={"quant_method": "fp8"}), r"quantization_config: .*fp8_cast_bf16.py"),
    (dict(rope_interleave=False), "rope_interleave false"),
    (dict(num_key_value_heads=8), "num_key_value_heads 8 differs"),
    (dict(scoring_func="softmax"), 'scoring_func "softmax" is not supported'),
    (dict(norm_topk_prob=False), "norm_topk_prob true"),
    (dict(topk_group=2), "topk_group 2 is not supported with num_experts_per_tok 8, but 4"),
    (dict(rope_scaling=DEEPSEEK["rope_scaling"] | dict(mscale=None)), "mscale_all_dim is supported with mscale"),
    (dict(model_type="other", auto_map={"AutoConfig": "x.Y"}), "auto_map: models with code of their own"),
    (dict(attention_bias=True), "attention_bias true"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        model_settings(DEEPSEEK | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "mesh", "message"),
    [
        ({}, dict(context_parallel_size=2), "--context-parallel-size 2 is not supported with latent attention"),
        (dict(mixer=replace(SIZES, kv_lora_rank=11)), dict(tensor_model_parallel_size=2), "does not divide kv"),
        (dict(lora_rank=2, lora_target_modules=["linear_qkv"]), {}, "linear_qkv: choose from linear_q_proj, lin"),
        (dict(recompute_granularity="selective"), {}, "does not support --recompute-granularity selective"),
        (dict(batch_invariant_mode=True), {}, "--batch-invariant-mode does not support"),
        (dict(kv_channels=8), {}, "needs --num-attention-heads .* and --kv-channels 10"),
        (dict(mixer_layer_freq="[1,0]"), {}, "does not support layers with plain attention"),
        (dict(rotary_percent=0.5), {}, "does not support rotary_percent below 1"),
        (dict(mixer=replace(SIZES, v_head_dim=0)), {}, "latent_attention: v_head_dim is 0; it must be at le"),
    ],
)
def test_models_that_cannot_be_built(change: dict, mesh: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        transformer_config(model_config(**LATENT | change), ParallelConfig(**mesh))
