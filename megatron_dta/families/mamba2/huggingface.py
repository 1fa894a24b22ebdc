"""config.json and tensors of Nemotron-H and Nemotron 3: layers of Mamba-2, attention, feed-forward or experts.

transformers bounds the step dt by ``time_step_min`` from below, without which these models were trained; nothing is
bounded here, and a config.json that is written here has a bound that is too low to matter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.families.mamba2.sizes import Sizes
from megatron_dta.families.sigmoid_router import sigmoid_router
from megatron_dta.training.huggingface.config.families import Family
from megatron_dta.training.huggingface.config.values import HfValues
from megatron_dta.training.huggingface.mappings import OUTSIDE_LAYERS, Place, Rule, query_key_value
from megatron_dta.training.huggingface.parameters import Sharding

# The key of config.json of each size.
_SIZES = {
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_state_dim": "ssm_state_size",
    "mamba_num_groups": "n_groups",
    "mamba_conv_kernel": "conv_kernel",
}
_LETTERS = {
    **{"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"},
    # In files of older versions.
    **{"mamba": "M", "attention": "*"},
}
# What transformers could compute otherwise, and what is supported.
_FIXED: dict[str, Any] = dict(
    mlp_hidden_act="relu2",
    mamba_hidden_act="silu",
    use_bias=False,
    mamba_proj_bias=False,
    use_conv_bias=True,
    residual_in_fp32=False,
    n_shared_experts=1,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    moe_latent_size=None,
)
FAMILIES = (
    Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        mixer="mamba2",
        published_as=("nemotron_h",),
        own_defaults={
            **_FIXED,
            **{key: getattr(Sizes(), name) for name, key in _SIZES.items()},
            # The pattern decides the number of layers.
            **dict(num_hidden_layers=1, intermediate_size=21504, num_key_value_heads=8, head_dim=128),
            **dict(layer_norm_epsilon=1e-5, max_position_embeddings=4096, n_routed_experts=8, num_experts_per_tok=2),
            **dict(moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, routed_scaling_factor=1.0),
            **dict(n_group=1, topk_group=1),
        },
    ),
)


def settings(values: HfValues, family: Family) -> dict[str, object]:
    """The settings of layers of one part."""
    pattern = _pattern(values)
    for key, supported in _FIXED.items():
        if values.get(key) != supported:
            raise values.error(f"{values.as_written(key)} is not supported; supported is {supported}")
    if values.get("time_step_limit") not in (None, [0, math.inf], [0, {"__float__": "Infinity"}]):
        raise values.error(f"{values.as_written('time_step_limit')} is not supported; supported is [0, Infinity]")
    sizes = Sizes(**{name: values.integer(key) for name, key in _SIZES.items()})
    return {
        "num_layers": len(pattern),
        "hybrid_layer_pattern": pattern,
        "mixer": sizes,
        "norm_epsilon": values.number("layer_norm_epsilon"),
        "swiglu": False,
        "squared_relu": True,
        "position_embedding_type": "none",
        **(_experts(values) if "E" in pattern else {}),
    }


def _pattern(values: HfValues) -> str:
    if "layers_block_type" in values or "layer_types" in values:
        types = values.texts("layers_block_type" if "layers_block_type" in values else "layer_types")
        pattern = "".join(_LETTERS.get(name, "?") for name in types)
    else:
        pattern = values.text("hybrid_override_pattern")
    if not pattern or set(pattern) - set(_LETTERS.values()):
        raise values.error(f"the layers {pattern or '(none)'} are not supported: supported are M, *, - and E")
    if not {"M", "*"} <= set(pattern):
        raise values.error(f"the layers {pattern} are not supported: both M and * must be among them")
    return pattern


def _experts(values: HfValues) -> dict[str, object]:
    width = values.integer("moe_shared_expert_intermediate_size")
    return sigmoid_router(values) | {"moe_shared_expert_intermediate_size": width}


def config(model: ModelConfig) -> dict[str, Any]:
    """The entries of a config.json of Nemotron-H.

    Raises:
        InputError: it has no such layers.
    """
    if model.hybrid_layer_pattern is None:
        raise InputError("Hugging Face models have Mamba-2 in layers of one part only (hybrid_layer_pattern)")
    names = {letter: name for name, letter in reversed(_LETTERS.items())}
    entries: dict[str, Any] = dict(
        architectures=["NemotronHForCausalLM"],
        model_type="nemotron_h",
        layers_block_type=[names[letter] for letter in model.hybrid_layer_pattern],
        layer_norm_epsilon=model.norm_epsilon,
        mlp_hidden_act="relu2",
        time_step_min=1e-12,
        **{key: getattr(model.mixer, name) for name, key in _SIZES.items()},
    )
    if model.num_experts is None:
        return entries
    return entries | dict(
        n_routed_experts=model.num_experts,
        num_experts_per_tok=model.moe_router_topk,
        moe_intermediate_size=model.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
        routed_scaling_factor=model.moe_router_topk_scaling_factor or 1.0,
        n_group=model.moe_router_num_groups or 1,
        topk_group=model.moe_router_group_topk or 1,
    )


def dimensions(sizes: Sizes) -> dict[str, int]:
    """The dimensions that the table below names."""
    return {f"mamba_{name}": rows for name, rows in sizes.sections.items()} | {
        "projected": sum(sizes.sections.values()),
        "filters": sizes.channels,
        "filter_width": sizes.mamba_conv_kernel,
    }


def _rule(part: Place, megatron: str, huggingface: str, shape: tuple[str, ...], *sharding: Sharding) -> Rule:
    return Rule(part, megatron, (f"mixer.{huggingface}",), shape, *sharding)


def _mamba(megatron: str, huggingface: str, shape: tuple[str, ...], *sharding: Sharding) -> Rule:
    return _rule(Place.MIXER, f"self_attention.{megatron}", huggingface, shape, *sharding)


def _feed_forward(part: Place, megatron: str, huggingface: str, width: str) -> list[Rule]:
    return [
        _rule(part, f"{megatron}linear_fc1.weight", f"{huggingface}up_proj.weight", (width, "hidden"), Sharding.ROWS),
        _rule(
            part, f"{megatron}linear_fc2.weight", f"{huggingface}down_proj.weight", ("hidden", width), Sharding.COLUMNS
        ),
    ]


def _outside(rule: Rule) -> Rule:
    (name,) = rule.huggingface
    renamed = name.replace("embed_tokens", "embeddings").replace("model.norm.", "model.norm_f.")
    return replace(rule, huggingface=(renamed,))


_SECTIONS = tuple(f"mamba_{name}" for name in Sizes().sections)
_FILTERED = tuple(f"mamba_{name}" for name in Sizes.filtered)
_QUERY_KEY_VALUE = query_key_value("weight", ("query_key_value", "hidden"))
RULES: dict[str, list[Rule]] = {
    "NemotronHForCausalLM": [
        *map(_outside, OUTSIDE_LAYERS),
        *(
            Rule(part, f"{norm}_layernorm.weight", ("norm.weight",), ("hidden",))
            for part, norm in (
                *((Place.MIXER, "input"), (Place.ATTENTION, "input")),
                *((Place.DENSE, "pre_mlp"), (Place.MIXTURE, "pre_mlp")),
            )
        ),
        replace(_QUERY_KEY_VALUE, huggingface=tuple(f"mixer.{part}_proj.weight" for part in "qkv")),
        _rule(
            Place.ATTENTION, "self_attention.linear_proj.weight", "o_proj.weight", ("hidden", "query"), Sharding.COLUMNS
        ),
        replace(
            _mamba("in_proj.weight", "in_proj.weight", ("projected", "hidden"), Sharding.SECTION_ROWS),
            sections=_SECTIONS,
        ),
        replace(
            _mamba("conv1d.weight", "conv1d.weight", ("filters", "filter_width"), Sharding.SECTION_ROWS),
            sections=_FILTERED,
        ),
        replace(_mamba("conv1d.bias", "conv1d.bias", ("filters",), Sharding.SECTION_ROWS), sections=_FILTERED),
        *(_mamba(name, name, ("mamba_dt",), Sharding.ROWS) for name in Sizes.head_vectors),
        _mamba("out_norm.weight", "norm.weight", ("mamba_z",), Sharding.ROWS),
        _mamba("out_proj.weight", "out_proj.weight", ("hidden", "mamba_z"), Sharding.COLUMNS),
        *_feed_forward(Place.DENSE, "mlp.", "", "feed_forward"),
        _rule(Place.MIXTURE, "mlp.router.weight", "gate.weight", ("experts", "hidden")),
        _rule(Place.MIXTURE, "mlp.router.expert_bias", "gate.e_score_correction_bias", ("experts",)),
        *_feed_forward(Place.MIXTURE, "mlp.shared_experts.", "shared_experts.", "shared_experts"),
        *_feed_forward(Place.EXPERT, "mlp.experts.local_experts.{expert}.", "experts.{expert}.", "expert"),
    ]
}
