"""Converts the rotary embedding settings of a Hugging Face configuration to those of ``ModelConfig``.

transformers 4 writes ``rope_theta`` and ``rope_scaling``; transformers 5 writes one object ``rope_parameters`` with
both. A file may hold either form, or both if they agree. ``megatron_dta.core.model.rotary`` computes the frequencies.
"""

from __future__ import annotations

import math

from megatron_dta.training.huggingface.config.values import HfValues

_SHARED_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_YARN_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}
_KEYS = {"default": set(), "linear": {"factor"}, "llama3": _LLAMA3_KEYS, "yarn": _YARN_KEYS}
# Keys without effect: some files contain keys of a scaling type that they do not use.
_IGNORED_KEYS = {"finetuned", "original_max_position_embeddings"}
# How Qwen3.5 divides channels among the positions of images, which are all the same for text.
_IMAGE_KEYS = {"mrope_section", "mrope_interleaved"}
_UNSCALED: dict[str, object] = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
}


def rope_settings(config: HfValues, in_part: bool = False) -> dict[str, object]:
    """Values of the rotary fields of ``ModelConfig``.

    Args:
        in_part: whether the family may rotate only a part of each head.

    Raises:
        InputError: the type of scaling is not supported, or a value is missing or has the wrong type.
    """
    rope = _rope_object(config, in_part)
    settings = {**_UNSCALED, "rotary_base": _base(config, rope)}
    if in_part:
        settings["rotary_percent"] = _rotated_part(config, rope)
    if rope is None:
        return settings
    kind = _kind(rope)
    unknown = sorted(rope.given() - _SHARED_KEYS - _KEYS[kind] - _IGNORED_KEYS - (_IMAGE_KEYS if in_part else set()))
    if unknown:
        raise rope.error(f"{unknown[0]} is not supported for rope_type {kind}")
    if kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = rope.number("factor")
    elif kind == "llama3":
        settings.update(_llama3(rope, config))
    elif kind == "yarn":
        settings.update(_yarn(rope, config))
    return settings


def _rotated_part(config: HfValues, rope: HfValues | None) -> float:
    holder = rope if rope is not None and "partial_rotary_factor" in rope else config
    part = holder.number("partial_rotary_factor")
    if part > 1:
        raise holder.error(f"{holder.as_written('partial_rotary_factor')} is not supported; it is a share of the head")
    return part


def _rope_object(config: HfValues, in_part: bool) -> HfValues | None:
    """The object with the rotary settings; None if there is no scaling."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new is not None and old is not None and new != old:
        raise config.error("rope_parameters and rope_scaling differ; keep the one that holds")
    rope = config.table("rope_parameters" if new is not None else "rope_scaling")
    if rope is not None and any(isinstance(value, dict) for value in rope.values()):
        raise rope.error("one rope for each kind of layer is not supported")
    for holder in (config, rope):
        given = holder is not None and "partial_rotary_factor" in holder and not in_part
        if given and holder.number("partial_rotary_factor") != 1:
            raise holder.error(f"{holder.as_written('partial_rotary_factor')} is not supported: the whole head rotates")
    return rope


def _base(config: HfValues, rope: HfValues | None) -> float:
    inside = rope.number("rope_theta", above=1) if rope is not None and "rope_theta" in rope else None
    outside = config.number("rope_theta", above=1) if inside is None or "rope_theta" in config else inside
    if inside is not None and inside != outside:
        raise config.error(f"rope_theta is {outside:g} outside and {inside:g} inside rope_parameters; keep one of them")
    return outside


def _kind(rope: HfValues) -> str:
    names = [rope.text(key) for key in ("rope_type", "type") if key in rope]
    if len(set(names)) > 1:
        raise rope.error(f"rope_type {names[0]} and type {names[1]} differ; keep rope_type")
    if not names and "factor" in rope:
        raise rope.error("rope_type is missing")
    kind = names[0] if names else "default"
    if kind not in _KEYS:
        raise rope.error(f"rope_type {kind} is not supported; supported are {', '.join(_KEYS)}")
    return kind


def _llama3(rope: HfValues, config: HfValues) -> dict[str, object]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": rope.number("factor"),
        "rope_scaling_low_freq_factor": low,
        "rope_scaling_high_freq_factor": high,
        "rope_scaling_original_max_position_embeddings": _original_length(rope, config),
    }


def _yarn(rope: HfValues, config: HfValues) -> dict[str, object]:
    factor = rope.number("factor")
    mscale, mscale_all_dim = _mscale(rope, factor)
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": _original_length(rope, config),
        "yarn_beta_fast": rope.number("beta_fast") if rope.get("beta_fast") else 32.0,
        "yarn_beta_slow": rope.number("beta_slow") if rope.get("beta_slow") else 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "no_yarn_correction_range_round_to_int": "truncate" in rope and not rope.flag("truncate"),
    }


def _mscale(rope: HfValues, factor: float) -> tuple[float, float]:
    """``mscale`` and ``mscale_all_dim``: the factor on cosine and sine is (0.1 mscale ln(factor) + 1) over the same
    with ``mscale_all_dim``.
    """
    if "attention_factor" in rope:
        wanted = rope.number("attention_factor")
        if factor > 1:
            return 10 * (wanted - 1) / math.log(factor), 0.0
        if wanted != 1:
            raise rope.error(f"attention_factor {wanted:g} is not supported with a factor of at most 1")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        return rope.number("mscale"), rope.number("mscale_all_dim")
    return 1.0, 0.0


def _original_length(rope: HfValues, config: HfValues) -> int:
    """Maximum length of the model before scaling. If it is absent, transformers uses the whole length."""
    inside = rope.integer("original_max_position_embeddings") if "original_max_position_embeddings" in rope else None
    length = inside or config.integer("max_position_embeddings")
    # Versions of transformers disagree on which of the two holds.
    if "original_max_position_embeddings" in config and config.get("original_max_position_embeddings") != length:
        raise config.error(f"original_max_position_embeddings differs from the scaling's {length}; keep one of them")
    return length
