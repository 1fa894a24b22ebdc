"""config.json and tensors of Qwen3-Next and Qwen3.5: gated delta net beside gated attention that is rotated in part."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron_dta.core.config.model import ModelConfig
from megatron_dta.families.gated_delta_net.sizes import Sizes
from megatron_dta.training.huggingface.config.config_output import expert_config
from megatron_dta.training.huggingface.config.families import Family
from megatron_dta.training.huggingface.config.values import HfValues
from megatron_dta.training.huggingface.mappings import (
    ATTENTION,
    DENSE,
    OUTSIDE_LAYERS,
    QUERY_KEY_NORM,
    ModelShape,
    Place,
    Rule,
    mixture,
    query_key_value,
    shared_experts,
)
from megatron_dta.training.huggingface.parameters import (
    Block,
    Sharding,
    concatenated_blocks,
    gated_head_group_blocks,
    interleaved_blocks,
)

_NAMES = tuple(field.name for field in fields(Sizes))
_DEFAULTS = {
    **{field.name: field.default for field in fields(Sizes)},
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "norm_topk_prob": True,
}
_OPTIONS: dict[str, Any] = dict(qk_norm=True, mixer="gated_delta_net")
FAMILIES = (
    Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        experts=True,
        own_defaults={**_DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 5632},
        **_OPTIONS,
    ),
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", own_defaults={**_DEFAULTS, "num_key_value_heads": 4}, **_OPTIONS),
    Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        experts=True,
        # Its layers have no other feed-forward part than experts.
        own_defaults={**_DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 512},
        **_OPTIONS,
    ),
)


def settings(values: HfValues, family: Family) -> dict[str, object]:
    """The settings of gated delta net, gated attention and shared experts."""
    layers = values.integer("num_hidden_layers")
    kinds = {"linear_attention": 1, "full_attention": 0}
    if "layer_types" in values:
        types = values.texts("layer_types")
        other = sorted(set(types) - kinds.keys())
        if other or len(types) != layers:
            raise values.error(
                f"layer_types has {f'the kind {other[0]}' if other else f'{len(types)} entries for {layers} layers'}; "
                f"supported are {layers} of {' and '.join(kinds)}"
            )
        pattern = [kinds[name] for name in types]
    else:
        interval = values.integer("full_attention_interval")
        pattern = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if all(pattern) or not any(pattern):
        raise values.error("layer_types: a model needs layers of both kinds, linear_attention and full_attention")
    shared: dict[str, object] = {}
    if family.experts:
        shared["moe_shared_expert_intermediate_size"] = values.integer("shared_expert_intermediate_size")
        shared["moe_shared_expert_gate"] = True
    return {
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
        "mixer": Sizes(**{name: values.integer(name) for name in _NAMES}),
        "mixer_layer_freq": str(pattern).replace(" ", ""),
        **shared,
    }


def config(model: ModelConfig) -> dict[str, Any]:
    """The entries of a config.json of Qwen3.5, or with experts of Qwen3-Next."""
    entries: dict[str, Any] = {name: getattr(model.mixer, name) for name in _NAMES}
    entries |= dict(
        layer_types=["linear_attention" if is_linear else "full_attention" for is_linear in model.mixer_layers],
        partial_rotary_factor=model.rotary_percent,
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
    )
    if model.num_experts is None:
        return entries
    plain = replace(model, moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False)
    shared = dict(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
    )
    return entries | expert_config(plain) | shared


def dimensions(sizes: Sizes) -> dict[str, int]:
    """The dimensions that the tables below name."""
    return {f"recurrent_{name}": rows for name, rows in sizes.sections.items()} | {
        "recurrent": sum(sizes.sections.values()),
        "filters": sizes.channels,
        "filter_width": sizes.linear_conv_kernel_dim,
        "recurrent_head": sizes.linear_value_head_dim,
    }


def _gated_query_key_value(shape: ModelShape, names: tuple[str, ...]) -> tuple[Block, ...]:
    per_group = shape.num_attention_heads // shape.num_query_groups
    return gated_head_group_blocks(names, shape.num_query_groups, per_group, shape.kv_channels)


def _by_head(shape: ModelShape, names: tuple[str, ...]) -> tuple[Block, ...]:
    """Qwen3-Next's input projection: the parts of a key head are adjacent."""
    rows = tuple(shape.mixer.sections.values())
    return interleaved_blocks(names, (rows[:4], rows[4:]), shape.mixer.linear_num_key_heads)


def _by_section(shape: ModelShape, names: tuple[str, ...]) -> tuple[Block, ...]:
    """Qwen3.5's: query, key and value of all heads in one tensor, then one tensor each."""
    return concatenated_blocks(names, (shape.mixer.channels, *list(shape.mixer.sections.values())[3:]))


def _layers(fused: bool) -> list[Rule]:
    """Norms, gated attention and gated delta net; ``fused`` is for Qwen3-Next, whose projections are two tensors."""
    norms = [rule for rule in ATTENTION if rule.part is Place.LAYER]
    attention = [rule for rule in ATTENTION if rule.megatron == "self_attention.linear_proj.weight"]
    gated = query_key_value("weight", ("gated_query_key_value", "hidden"))
    parts = ("in_proj_qkvz", "in_proj_ba") if fused else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    sections = tuple(f"recurrent_{name}" for name in Sizes().sections)

    def recurrent(megatron: str, huggingface: tuple[str, ...], shape: tuple[str, ...], *options: Any) -> Rule:
        names = tuple(f"linear_attn.{name}" for name in huggingface)
        return Rule(Place.MIXER, f"self_attention.{megatron}", names, shape, *options)

    return [
        *norms,
        replace(gated, arrangement=_gated_query_key_value),
        *attention,
        *QUERY_KEY_NORM,
        replace(
            recurrent(
                "in_proj.weight",
                tuple(f"{part}.weight" for part in parts),
                ("recurrent", "hidden"),
                Sharding.SECTION_ROWS,
            ),
            arrangement=_by_head if fused else _by_section,
            sections=sections,
        ),
        replace(
            recurrent("conv1d.weight", ("conv1d.weight",), ("filters", "filter_width"), Sharding.SECTION_ROWS),
            sections=sections[:3],
        ),
        recurrent("dt_bias", ("dt_bias",), ("recurrent_alpha",), Sharding.ROWS),
        recurrent("A_log", ("A_log",), ("recurrent_alpha",), Sharding.ROWS),
        recurrent("out_norm.weight", ("norm.weight",), ("recurrent_head",)),
        recurrent("out_proj.weight", ("out_proj.weight",), ("hidden", "recurrent_value"), Sharding.COLUMNS),
    ]


_MIXTURE = [
    *mixture("mlp", "gate_proj", "up_proj", "down_proj"),
    *shared_experts("mlp.shared_expert"),
    Rule(Place.MIXTURE, "mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), ("one", "hidden")),
]
RULES: dict[str, list[Rule]] = {
    "Qwen3NextForCausalLM": [*OUTSIDE_LAYERS, *_layers(fused=True), *DENSE, *_MIXTURE],
    "Qwen3_5ForCausalLM": [*OUTSIDE_LAYERS, *_layers(fused=False), *DENSE],
    "Qwen3_5MoeForCausalLM": [*OUTSIDE_LAYERS, *_layers(fused=False), *_MIXTURE],
}
