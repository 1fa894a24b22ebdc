"""Converts a model's settings to the ``config.json`` of an equivalent Hugging Face architecture.

It serves models that were not created from a Hugging Face checkpoint. The result is read back (``config``). A model
whose settings differ afterwards has no equivalent architecture and is refused.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.config.options import flag_of
from megatron_dta.core.families import part_of
from megatron_dta.training.huggingface.config.config import model_settings
from megatron_dta.training.huggingface.config.values import CONFIG_FILE

# Files of a tokenizer in addition to the one that --tokenizer-model names.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "generation_config.json"),
)
# Fields that are redundant with other fields, and one that only training reads.
_SAID_OTHERWISE = ("moe_layer_freq", "mixer_layer_freq", "moe_router_bias_update_rate")


def config_from_settings(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE, Qwen3-Next or Qwen3.5 model with these settings.

    Raises:
        InputError: none of them computes what these settings say; the message names a flag.
    """
    config = huggingface_config(model)
    config["initializer_range"] = model.init_method_std
    config["torch_dtype"] = str(model.params_dtype).removeprefix("torch.")
    known = {setting.name: setting for setting in fields(ModelConfig)}
    for name, value in model_settings(config).items():
        used = getattr(model, name)
        if name not in _SAID_OTHERWISE and not _same(used, value):
            raise InputError(
                f"{flag_of(known[name])} is {used}, which no supported Hugging Face architecture has (it would be "
                f"{value}); train with --swiglu --disable-bias-linear --normalization RMSNorm for a model that exports"
            )
    return config


def _same(setting: Any, value: Any) -> bool:
    if type(setting) is float or type(value) is float:
        return None not in (setting, value) and math.isclose(setting, value, rel_tol=1e-12)
    return setting == value


def huggingface_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of the closest family, in the format that transformers 4 writes and 5 reads.

    The family is Qwen2 with a QKV bias, Qwen3 with QK-norm, and otherwise Llama; with experts it is Mixtral or
    Qwen3-MoE. A model with another mixer has the entries of its folder (``core.families``).
    """
    if model.qk_layernorm and model.add_qkv_bias:
        raise InputError("--qk-layernorm with --add-qkv-bias: no Hugging Face model has both; leave one out")
    family = "Qwen3" if model.qk_layernorm else "Qwen2" if model.add_qkv_bias else "Llama"
    config = dict(
        architectures=[f"{family}ForCausalLM"],
        model_type=family.lower(),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        hidden_act="silu",
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.norm_epsilon,
        rope_theta=float(model.rotary_base),
        rope_scaling=rope_scaling(model),
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        attention_dropout=0.0,
    )
    if model.mixer is not None:
        return config | part_of(model.mixer.kind, "huggingface").config(model)
    return config if model.num_experts is None else config | expert_config(model)


def model_from_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """The model of a run's settings by flag, as a checkpoint stores them.

    Raises:
        InputError: the settings do not describe a model.
    """
    known = {setting.name: flag_of(setting) for setting in fields(ModelConfig) if setting.name != "params_dtype"}
    try:
        return ModelConfig(**{name: settings[flag] for name, flag in known.items() if flag in settings})
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(
            f"the checkpoint's settings describe no model ({' '.join(str(error).split())[:120]})"
        ) from error


def write_template(folder: Path, config: dict[str, Any], tokenizer: str | None) -> None:
    """Write the files that accompany the weights: config.json and, if there is a tokenizer, its files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        given = Path(tokenizer)
        beside = given if given.is_dir() else given.parent
        # Another file of that name may exist next to a tokenizer that is a single file.
        names = _TOKENIZER_FILES if given.is_dir() or given.name in _TOKENIZER_FILES else ()
        for name in names:
            if (beside / name).is_file():
                shutil.copyfile(beside / name, folder / name)


def rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a config.json."""
    if model.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if model.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
        }
    if model.position_embedding_type != "yarn":
        return None
    scaling = {
        "rope_type": "yarn",
        "factor": model.rotary_scaling_factor,
        "original_max_position_embeddings": model.yarn_original_max_position_embeddings,
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
        "truncate": not model.no_yarn_correction_range_round_to_int,
    }
    # Omitted for these two values, which are transformers' default.
    if (model.mscale, model.mscale_all_dim) != (1.0, 0.0):
        grown, divisor = (
            1 + 0.1 * mscale * math.log(model.rotary_scaling_factor) if model.rotary_scaling_factor > 1 else 1.0
            for mscale in (model.mscale, model.mscale_all_dim)
        )
        scaling["attention_factor"] = grown / divisor
    return scaling


def expert_config(model: ModelConfig) -> dict[str, Any]:
    """The entries of a config.json for experts.

    Raises:
        InputError: neither Mixtral nor Qwen3-MoE has such experts or such a router.
    """
    if (
        model.moe_router_score_function != "softmax"
        or model.moe_router_pre_softmax
        or model.moe_router_group_topk
        or model.moe_router_topk_scaling_factor
        or model.moe_shared_expert_intermediate_size
        or model.add_qkv_bias
        or not all(model.moe_layers)
    ):
        raise InputError("Hugging Face models have Mixtral's and Qwen3-MoE's experts only here, in every layer")
    family = "Qwen3Moe" if model.qk_layernorm else "Mixtral"
    shape = dict(architectures=[f"{family}ForCausalLM"], num_experts_per_tok=model.moe_router_topk)
    if family == "Mixtral":
        return shape | dict(
            model_type="mixtral",
            num_local_experts=model.num_experts,
            intermediate_size=model.moe_ffn_hidden_size,
            sliding_window=None,
        )
    return shape | dict(
        model_type="qwen3_moe",
        num_experts=model.num_experts,
        moe_intermediate_size=model.moe_ffn_hidden_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
