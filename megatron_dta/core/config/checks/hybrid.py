"""Rejects settings of other mixers than plain attention that conflict, with a line that names the flag and the fix."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig


def check_hybrid(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ``InputError`` for settings with which gated attention or another mixer cannot be built."""
    if model.apply_layernorm_1p and model.normalization != "RMSNorm":
        raise InputError(f"apply_layernorm_1p with --normalization {model.normalization} is not supported")
    if model.transformer_impl != "local" and (model.apply_layernorm_1p or model.attention_output_gate):
        flag = "apply_layernorm_1p" if model.apply_layernorm_1p else "attention_output_gate"
        raise InputError(f"{flag} needs --transformer-impl local")
    if model.hybrid_layer_pattern is not None:
        _check_pattern(model, model.hybrid_layer_pattern)
    if model.squared_relu and model.swiglu:
        raise InputError("squared_relu excludes --swiglu; leave one of them out")
    if model.mixer is None:
        return
    kind = model.mixer.kind
    for name, size in model.mixer.settings.items():
        if isinstance(size, int) and size < 1:
            raise InputError(f"{kind}: {name} is {size}; it must be at least 1")
    if model.mixer.is_recurrent and all(model.mixer_layers):
        raise InputError(f"mixer_layer_freq {model.mixer_layer_freq}: no layer has attention; raise it")
    if model.transformer_impl != "local":
        raise InputError(f"{kind} needs --transformer-impl local")
    model.mixer.check(model, parallel)
    refusal = model.mixer.heads_refusal(parallel.tensor_model_parallel_size, parallel.context_parallel_size)
    if refusal is not None:
        raise InputError(refusal)


def _check_pattern(model: ModelConfig, pattern: str) -> None:
    if len(pattern) != model.num_layers or set(pattern) - set("M*-E"):
        raise InputError(
            f"hybrid_layer_pattern {pattern}: give one of M, *, - and E for each of --num-layers {model.num_layers}"
        )
    if "*" not in pattern:
        raise InputError(f"hybrid_layer_pattern {pattern}: no layer has attention (*)")
    for letter, setting in (("M", model.mixer), ("E", model.num_experts)):
        if (letter in pattern) != (setting is not None):
            raise InputError(f"hybrid_layer_pattern {pattern}: layers {letter} need sizes, and sizes need such layers")
    if model.mixer_layer_freq is not None or model.moe_layer_freq != "1" or model.swiglu:
        raise InputError("hybrid_layer_pattern excludes mixer_layer_freq, --moe-layer-freq and --swiglu")
