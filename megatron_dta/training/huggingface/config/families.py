"""Lists the supported Hugging Face architectures and their differences.

They are Llama 2 and 3.x, Mistral, Mixtral, Qwen2 and 2.5, Qwen3 and Qwen3-MoE, and those of the folders of
``core.families``, also inside a model with a vision tower, whose config.json nests the text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron_dta.core.families import FOLDERS, part_of
from megatron_dta.training.huggingface.config.values import CONFIG_FILE, HfValues


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its differences from Llama and its defaults for absent keys.

    Attributes:
        architecture: transformers' class, as in ``architectures`` of config.json.
        model_type: the value of ``model_type`` in config.json.
        qkv_bias: bias on the query, key and value projection.
        qk_norm: normalization of queries and keys per head.
        experts: whether the layers have a mixture of experts.
        window: condition for sliding-window attention: "none", "set" (``sliding_window`` is set) or "use" (also
            ``use_sliding_window`` must be true).
        mixer: the folder of the kind of layer that it has besides plain attention (``core.families``); None if none.
        published_as: values of ``model_type`` with which folders also name code of their own (``auto_map``), which
            computes the same and is not run.
        own_defaults: defaults of the keys whose default differs between families.
    """

    architecture: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    window: str = "none"
    mixer: str | None = None
    published_as: tuple[str, ...] = ()
    own_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """transformers' defaults for absent keys of config.json."""
        return {**COMMON_DEFAULTS, **self.own_defaults}


COMMON_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
# Those with plain attention only.
_PLAIN = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", own_defaults={"max_position_embeddings": 2048}),
        Family(
            "MistralForCausalLM",
            "mistral",
            window="set",
            own_defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        ),
        Family(
            "MixtralForCausalLM",
            "mixtral",
            experts=True,
            window="set",
            own_defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "norm_topk_prob": True,
                "max_position_embeddings": 131072,
            },
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            qkv_bias=True,
            window="use",
            own_defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            qk_norm=True,
            window="use",
            own_defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        ),
        Family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            qk_norm=True,
            experts=True,
            window="use",
            # Its window, unlike the two others', holds for all layers.
            own_defaults={"num_key_value_heads": 4, "sliding_window": 4096, "max_window_layers": 0},
        ),
    )
}


@cache
def families() -> dict[str, Family]:
    """All families by architecture."""
    modules = (part_of(kind, "huggingface") for kind in FOLDERS)
    return _PLAIN | {family.architecture: family for module in modules for family in module.FAMILIES}


# The text models of architectures that also have a vision tower, by architecture and by model_type.
_TEXT_MODELS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_TEXT_MODELS_BY_TYPE = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
# Keys that hold for the whole model; beside ``text_config`` they take precedence over the same keys in it.
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "compression_config", "auto_map")


def text_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model: ``config`` itself, or what it nests beside that of a vision tower."""
    names, text = config.get("architectures"), config.get("text_config")
    if names is None:
        name = _TEXT_MODELS_BY_TYPE.get(str(config.get("model_type")))
    else:
        name = _TEXT_MODELS.get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None
    if name is None or not isinstance(text, dict):
        return dict(config)
    outside = {key: config[key] for key in _OF_THE_WHOLE if key in config}
    return {**text, **outside, "architectures": [name]}


def architecture(config: Mapping[str, Any], origin: str = CONFIG_FILE) -> Family:
    """The family that ``config`` names; error messages call the configuration ``origin``.

    Raises:
        InputError: the configuration names no family or an unsupported one.
    """
    values = HfValues(text_model(config), origin)
    names = values.get("architectures")
    if names is None:
        by_type = {family.model_type: name for name, family in families().items()}
        model_type = values.text("model_type")
        names = [by_type.get(model_type, f"of model_type {model_type}")]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise values.error(f"architectures is {str(names)[:60]}; it must be a list of one name")
    if "vision_config" in values:
        raise values.error(
            f"{names[0]} has a vision tower, beside which only the text models of {' and '.join(_TEXT_MODELS)} are "
            "supported"
        )
    if names[0] not in families():
        raise values.error(f"the architecture {names[0]} is not supported; supported are {', '.join(families())}")
    family = families()[names[0]]
    if "auto_map" in values and values.get("model_type") not in family.published_as:
        raise values.error("auto_map: models with code of their own are not supported")
    if "model_type" in values and values.text("model_type") not in (family.model_type, *family.published_as):
        raise values.error(f"model_type {values.text('model_type')} does not belong to the architecture {names[0]}")
    return family
