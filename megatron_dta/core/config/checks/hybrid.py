"""Rejects settings of layers with linear attention that conflict, with a line that names the flag and the fix."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.core.shapes.decoder import linear_heads_refusal


def check_hybrid(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ``InputError`` for settings with which layers with linear attention cannot be built."""
    if model.apply_layernorm_1p and model.normalization != "RMSNorm":
        raise InputError(f"apply_layernorm_1p with --normalization {model.normalization} is not supported")
    if model.transformer_impl != "local" and (model.apply_layernorm_1p or model.attention_output_gate):
        flag = "apply_layernorm_1p" if model.apply_layernorm_1p else "attention_output_gate"
        raise InputError(f"{flag} needs --transformer-impl local")
    if model.experimental_attention_variant is None:
        return
    if model.linear_attention_freq is None:
        raise InputError("experimental_attention_variant gated_delta_net needs linear_attention_freq, such as 4")
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if all(model.linear_attention_layers):
        raise InputError(f"linear_attention_freq {model.linear_attention_freq}: no layer has attention; raise it")
    if values % keys:
        raise InputError(
            f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}; change one of them"
        )
    if model.transformer_impl != "local":
        raise InputError("experimental_attention_variant gated_delta_net needs --transformer-impl local")
    if not (model.swiglu and model.normalization == "RMSNorm" and model.disable_bias_linear):
        raise InputError(
            "experimental_attention_variant gated_delta_net needs --swiglu, --normalization RMSNorm and "
            "--disable-bias-linear"
        )
    refusal = linear_heads_refusal(parallel.tensor_model_parallel_size, parallel.context_parallel_size, keys, values)
    if refusal is not None:
        raise InputError(refusal)
