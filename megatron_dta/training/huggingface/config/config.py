"""Converts a Hugging Face ``config.json`` to the fields of ``ModelConfig``, for families that Megatron can compute.

A key that changes the model's result is either converted or refused by name; nothing is guessed. An absent key has
transformers' default for the family. ``families`` lists what is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.options import flag_of
from megatron_dta.core.families import part_of
from megatron_dta.core.shapes.moe_layers import parse_mixer_layer_freq, parse_moe_layer_freq
from megatron_dta.training.huggingface.config.families import Family, architecture, text_model
from megatron_dta.training.huggingface.config.rope import rope_settings
from megatron_dta.training.huggingface.config.values import CONFIG_FILE, HfValues, read_hf_config

__all__ = ["Family", "architecture", "model_settings", "read_hf_config", "settings_from_hf", "text_model"]

# Fields that the run may choose; config.json's value is their default.
_CHOICES = ("max_position_embeddings", "init_method_std", "moe_router_bias_update_rate")
# The keys of config.json that each field comes from, for messages; other fields come from the architecture.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "norm_epsilon": "layer_norm_epsilon rms_norm_eps",
    "untie_embeddings_and_output_weights": "tie_word_embeddings",
    "num_experts": "num_experts n_routed_experts num_local_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_pre_softmax": "norm_topk_prob",
    "moe_layer_freq": "decoder_sparse_step",
    "mixer_layer_freq": "layer_types",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size shared_expert_intermediate_size",
}
_ROPE_FIELDS = ("rotary", "rope", "yarn", "mscale", "position_embedding", "no_yarn", "use_rope")


def model_settings(
    config: Mapping[str, Any], max_position_embeddings: int | None = None, origin: str = CONFIG_FILE
) -> dict[str, object]:
    """The fields of ``ModelConfig`` that ``config`` decides, by name.

    Args:
        config: as ``read_hf_config`` returns it.
        max_position_embeddings: longest sequence that the model will see; None uses the configuration's value.
        origin: name of the configuration in error messages.

    Raises:
        InputError: a value is missing or has the wrong type, or a key that changes the result is not supported.
    """
    family = architecture(config, origin)
    values = HfValues(text_model(config), origin, family.defaults)
    _refuse_unsupported(values, family)
    longest = max_position_embeddings or values.integer("max_position_embeddings")
    _refuse_window(values, family, longest)
    hidden_size, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    groups = heads if values.get("num_key_value_heads") is None else values.integer("num_key_value_heads")
    if heads % groups:
        raise values.error(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
    if values.get("head_dim") is None and hidden_size % heads:
        raise values.error(f"hidden_size {hidden_size} is not divisible by num_attention_heads {heads}")
    head_size = hidden_size // heads if values.get("head_dim") is None else values.integer("head_dim")
    if head_size % 2:
        raise values.error(f"the head size {head_size} is odd, so it cannot be rotated")
    return {
        "num_layers": values.integer("num_hidden_layers"),
        "hidden_size": hidden_size,
        "ffn_hidden_size": values.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_size,
        "max_position_embeddings": longest,
        "vocab_size": values.integer("vocab_size"),
        "normalization": "RMSNorm",
        "norm_epsilon": values.number("rms_norm_eps"),
        "swiglu": True,
        **rope_settings(values, "partial_rotary_factor" in family.defaults),
        "qk_layernorm": family.qk_norm,
        "add_qkv_bias": family.qkv_bias,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not values.flag("tie_word_embeddings"),
        "init_method_std": values.number("initializer_range"),
        **(_expert_settings(values, family) if family.experts else {}),
        **(part_of(family.mixer, "huggingface").settings(values, family) if family.mixer is not None else {}),
    }


def settings_from_hf(folder: str | Path, explicit: Mapping[str, object]) -> dict[str, object]:
    """Combine the fields of ``ModelConfig`` from ``folder``'s config.json with those that the user gave.

    Args:
        folder: a Hugging Face checkpoint.
        explicit: fields that the user gave, by name, and only those.

    Raises:
        InputError: config.json cannot be used, or a field of ``explicit`` contradicts it.
    """
    config = read_hf_config(folder)
    origin = str(Path(folder) / CONFIG_FILE)
    length = explicit.get("max_position_embeddings")
    settings = model_settings(config, length if isinstance(length, int) else None, origin)
    known = {setting.name: setting for setting in fields(ModelConfig)}
    if explicit.get("num_experts") and "num_experts" not in settings:
        raise InputError(f"--num-experts contradicts {origin}, a model without experts; leave the flag out")
    for name, value in explicit.items():
        if name in settings and name not in _CHOICES and not _same(name, value, settings):
            flag = flag_of(known[name])
            shown = flag if value is True else f"{flag} {value}"
            raise InputError(f"{shown} contradicts {origin}: {_source(name, config, settings)}; leave the flag out")
    return {**settings, **explicit}


def _same(name: str, value: object, settings: Mapping[str, object]) -> bool:
    """Whether a field given as ``value`` agrees with config.json."""
    parsers = {"moe_layer_freq": parse_moe_layer_freq, "mixer_layer_freq": parse_mixer_layer_freq}
    if name in parsers:
        num_layers, parse = int(str(settings["num_layers"])), parsers[name]
        return parse(str(value), num_layers) == parse(str(settings[name]), num_layers)
    return value == settings[name]


def _source(name: str, config: Mapping[str, Any], settings: Mapping[str, object]) -> str:
    """The entry of ``config`` that determined the field ``name``, as written there."""
    family = architecture(config)
    values = HfValues(text_model(config), CONFIG_FILE, family.defaults)
    keys = _KEYS.get(name, "").split()
    key = next((key for key in keys if values.get(key) is not None), keys[-1] if keys else None)
    if name == "rotary_base":
        return f"rope_theta {settings[name]:g}"
    if name.startswith(_ROPE_FIELDS):
        key = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    if key is None:
        return f"the architecture is {family.architecture}"
    return values.as_written(key) if values.get(key) is not None else f"no {key}, which means {settings[name]}"


def _refuse_unsupported(values: HfValues, family: Family) -> None:
    """Refuse keys that change the result and that this project's models do not support."""
    for key in ("quantization_config", "compression_config"):
        if key in values:
            raise values.error(
                f"{key}: quantized weights are not supported; use the checkpoint in bfloat16 or float32 (FP8 by "
                "inference/fp8_cast_bf16.py of DeepSeek-V3's repository, without this key)"
            )
    if values.text("hidden_act") not in ("silu", "swish"):
        raise values.error(f"hidden_act {values.text('hidden_act')} is not supported; supported is silu")
    for key in ("attention_bias", "qkv_bias", "mlp_bias"):
        # Qwen2 always has a bias on query, key and value, without a key for it.
        follows_family = family.qkv_bias and key != "mlp_bias"
        if key in values and values.flag(key) and not follows_family:
            raise values.error(f"{key} true is not supported for {family.architecture}")
    for key in ("attention_dropout", "hidden_dropout", "router_jitter_noise"):
        if values.get(key):
            raise values.error(
                f"{values.as_written(key)} is not supported: training is without it; set it to 0 in {CONFIG_FILE}"
            )
    if "attn_output_gate" in values and values.flag("attn_output_gate") is (family.mixer is None):
        raise values.error(f"{values.as_written('attn_output_gate')} is not supported for {family.architecture}")
    if "output_gate_type" in values and values.text("output_gate_type") not in ("silu", "swish"):
        raise values.error(f"{values.as_written('output_gate_type')} is not supported; supported is swish")
    if "pretraining_tp" in values and values.integer("pretraining_tp") > 1:
        raise values.error(f"{values.as_written('pretraining_tp')} is not supported; supported is 1")


def _refuse_window(values: HfValues, family: Family, longest: int) -> None:
    """Refuse a sliding window unless all sequences fit into it."""
    if family.window == "none" or values.get("sliding_window") is None:
        return
    if family.window == "use" and not ("use_sliding_window" in values and values.flag("use_sliding_window")):
        return
    window = values.integer("sliding_window")
    if "layer_types" in values:
        slides = "sliding_attention" in values.texts("layer_types")
    else:
        first = values.integer("max_window_layers", 0) if family.window == "use" else 0
        slides = first < values.integer("num_hidden_layers")
    if slides and window < longest:
        raise values.error(
            f"sliding_window {window} is not supported for sequences longer than it; "
            f"give --max-position-embeddings {window} or less"
        )


def _expert_settings(values: HfValues, family: Family) -> dict[str, object]:
    """The settings of a mixture of experts. Megatron's softmax over the top k equals transformers' normalized top k."""
    experts = values.integer("num_experts" if "num_experts" in values else "num_local_experts")
    chosen = values.integer("num_experts_per_tok")
    if chosen > experts:
        raise values.error(f"num_experts_per_tok {chosen} is more than the {experts} experts")
    mixtral = family.model_type == "mixtral"
    normalized = mixtral or values.flag("norm_topk_prob")
    if normalized and chosen == 1:
        raise values.error("num_experts_per_tok 1 is not supported where the choice is normalized: its weight is 1")
    return {
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not normalized,
        "moe_ffn_hidden_size": values.integer("intermediate_size" if mixtral else "moe_intermediate_size"),
        "moe_layer_freq": 1 if mixtral else _expert_layers(values),
    }


def _expert_layers(values: HfValues) -> int | list[int]:
    """Megatron's ``moe_layer_freq``: 1 if all layers have experts, else 1 or 0 for each layer."""
    layers, step = values.integer("num_hidden_layers"), values.integer("decoder_sparse_step")
    dense = values.integers("mlp_only_layers") if "mlp_only_layers" in values else []
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    if not any(pattern):
        raise values.error("no layer has experts (decoder_sparse_step, mlp_only_layers)")
    return 1 if all(pattern) else pattern
