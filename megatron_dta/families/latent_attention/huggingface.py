"""config.json and tensors of DeepSeek V3 (also Moonlight and Kimi K2) and GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.families.latent_attention.sizes import Sizes
from megatron_dta.families.sigmoid_router import sigmoid_router
from megatron_dta.training.huggingface.config.config_output import rope_scaling
from megatron_dta.training.huggingface.config.families import Family
from megatron_dta.training.huggingface.config.values import HfValues
from megatron_dta.training.huggingface.mappings import (
    ATTENTION,
    DENSE,
    OUTSIDE_LAYERS,
    Place,
    Rule,
    mixture,
    shared_experts,
)
from megatron_dta.training.huggingface.parameters import Sharding

_SIZES = ("q_lora_rank", "kv_lora_rank", "v_head_dim")
_DEEPSEEK = {
    **dict(intermediate_size=18432, num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256),
    **dict(moe_intermediate_size=2048, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3),
    **dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    **dict(routed_scaling_factor=2.5, norm_topk_prob=True, rope_interleave=True, max_position_embeddings=4096),
    # Its own sizes hold for heads.
    **dict(head_dim=64),
}
_GLM = _DEEPSEEK | {
    **dict(intermediate_size=10240, num_key_value_heads=20, n_routed_experts=64, moe_intermediate_size=1536),
    **dict(num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=768),
    **dict(qk_nope_head_dim=192, v_head_dim=256, routed_scaling_factor=1.8, max_position_embeddings=202752),
    **dict(rms_norm_eps=1e-5),
}
FAMILIES = (
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        mixer="latent_attention",
        own_defaults=_DEEPSEEK,
        published_as=("deepseek_v3", "kimi_k2"),
    ),
    Family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", mixer="latent_attention", own_defaults=_GLM),
)


def settings(values: HfValues, family: Family) -> dict[str, object]:
    """The settings of latent attention, its positions and its experts."""
    heads = values.integer("num_attention_heads")
    if values.integer("num_key_value_heads") != heads:
        raise values.error(f"{values.as_written('num_key_value_heads')} differs from num_attention_heads {heads}")
    if not values.flag("rope_interleave"):
        raise values.error("rope_interleave false is not supported; supported is true")
    sizes = Sizes(
        num_heads=heads,
        q_lora_rank=None if values.get("q_lora_rank") is None else values.integer("q_lora_rank"),
        kv_lora_rank=values.integer("kv_lora_rank"),
        qk_head_dim=values.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=values.integer("qk_rope_head_dim"),
        v_head_dim=values.integer("v_head_dim"),
    )
    _check_scaling(values)
    return {"mixer": sizes, "kv_channels": sizes.query_size, **_experts(values)}


def _check_scaling(values: HfValues) -> None:
    """Refuse scalings of positions whose factors on scores and on cosine and sine cannot both be had."""
    rope = values.table("rope_parameters") or values.table("rope_scaling")
    if rope is None or not rope.get("mscale_all_dim"):
        return
    if not rope.get("mscale") or "attention_factor" in rope:
        raise rope.error("mscale_all_dim is supported with mscale and without attention_factor only")


def _experts(values: HfValues) -> dict[str, object]:
    layers = _expert_layers(values)
    if not any(layers):
        return {}
    for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if key in values and values.text(key) != supported:
            raise values.error(f"{values.as_written(key)} is not supported; supported is {supported}")
    if "moe_layer_freq" in values and values.integer("moe_layer_freq") != 1:
        raise values.error(f"{values.as_written('moe_layer_freq')} is not supported; supported is 1")
    return sigmoid_router(values) | {
        "moe_layer_freq": str(layers).replace(" ", ""),
        "moe_shared_expert_intermediate_size": values.integer("n_shared_experts")
        * values.integer("moe_intermediate_size"),
    }


def _expert_layers(values: HfValues) -> list[int]:
    """For each layer, 1 if it has experts."""
    count, kinds = values.integer("num_hidden_layers"), {"dense": 0, "sparse": 1}
    if "mlp_layer_types" not in values:
        dense = min(count, values.integer("first_k_dense_replace", 0))
        return [0] * dense + [1] * (count - dense)
    types = values.texts("mlp_layer_types")
    if len(types) != count or set(types) - kinds.keys():
        raise values.error(f"mlp_layer_types must name {count} layers, each {' or '.join(kinds)}")
    return [kinds[name] for name in types]


def config(model: ModelConfig) -> dict[str, Any]:
    """The entries of a config.json of DeepSeek V3.

    Raises:
        InputError: it has no such experts.
    """
    sizes: Sizes = model.mixer
    dense = sum(not has_experts for has_experts in model.moe_layers)
    entries: dict[str, Any] = dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        **{name: getattr(sizes, name) for name in _SIZES},
        qk_nope_head_dim=sizes.qk_head_dim,
        qk_rope_head_dim=sizes.qk_pos_emb_head_dim,
        head_dim=sizes.qk_pos_emb_head_dim,
        rope_interleave=True,
        rope_scaling=_rope_scaling(model),
        attention_bias=False,
        first_k_dense_replace=dense,
        num_nextn_predict_layers=0,
    )
    if model.num_experts is None:
        return entries
    width, shared = model.moe_ffn_hidden_size, model.moe_shared_expert_intermediate_size
    if not shared or shared % width or model.moe_shared_expert_gate or any(model.moe_layers[:dense]):
        raise InputError(
            "DeepSeek V3 has experts in all layers behind the dense ones, and shared experts as wide as a multiple of "
            "--moe-ffn-hidden-size, without a gate"
        )
    return entries | dict(
        n_routed_experts=model.num_experts,
        n_shared_experts=shared // width,
        moe_intermediate_size=width,
        num_experts_per_tok=model.moe_router_topk,
        n_group=model.moe_router_num_groups or 1,
        topk_group=model.moe_router_group_topk or 1,
        routed_scaling_factor=model.moe_router_topk_scaling_factor or 1.0,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """``rope_scaling``, which says here by which factors it was computed, as the scores depend on one of them."""
    scaling = rope_scaling(model)
    if model.position_embedding_type == "yarn" and model.mscale_all_dim:
        scaling = {key: value for key, value in scaling.items() if key != "attention_factor"}
        scaling |= dict(mscale=model.mscale, mscale_all_dim=model.mscale_all_dim)
    return scaling


def dimensions(sizes: Sizes) -> dict[str, int]:
    """The dimensions that the tables below name; 0 where the model has no such tensor."""
    queries, low = sizes.num_heads * sizes.query_size, sizes.q_lora_rank or 0
    return {
        "plain_queries": 0 if low else queries,
        "queries": queries,
        "query_latent": low,
        "latent": sizes.kv_lora_rank,
        "slot": sizes.slot,
        "expanded": sizes.num_heads * (sizes.qk_head_dim + sizes.v_head_dim),
        "head_values": sizes.num_heads * sizes.v_head_dim,
    }


def _rule(megatron: str, huggingface: str, shape: tuple[str, ...], sharding: Sharding = Sharding.ROWS) -> Rule:
    names = (f"self_attn.{huggingface}.weight",)
    return Rule(Place.MIXER, f"self_attention.{megatron}.weight", names, shape, sharding)


_LAYERS = [
    *(rule for rule in ATTENTION if rule.part is Place.LAYER),
    _rule("linear_q_proj", "q_proj", ("plain_queries", "hidden")),
    _rule("linear_q_down_proj", "q_a_proj", ("query_latent", "hidden")),
    _rule("q_layernorm", "q_a_layernorm", ("query_latent",), Sharding.WHOLE),
    _rule("linear_q_up_proj", "q_b_proj", ("queries", "query_latent")),
    _rule("linear_kv_down_proj", "kv_a_proj_with_mqa", ("slot", "hidden")),
    _rule("kv_layernorm", "kv_a_layernorm", ("latent",), Sharding.WHOLE),
    _rule("linear_kv_up_proj", "kv_b_proj", ("expanded", "latent")),
    _rule("linear_proj", "o_proj", ("hidden", "head_values"), Sharding.COLUMNS),
    *DENSE,
    *mixture("mlp", "gate_proj", "up_proj", "down_proj"),
    Rule(Place.MIXTURE, "mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), ("experts",)),
    *shared_experts("mlp.shared_experts"),
]
RULES = {family.architecture: [*OUTSIDE_LAYERS, *_LAYERS] for family in FAMILIES}
