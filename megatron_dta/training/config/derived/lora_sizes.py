"""Computes the number of LoRA parameters from the settings."""

from __future__ import annotations

from megatron_dta.core.config.model import ModelConfig


def adapter_parameters(model: ModelConfig) -> int:
    """Number of parameters of all adapters of the whole model; 0 without adapters."""
    if model.lora_rank is None:
        return 0
    queries, groups = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    projected = (1 + model.attention_output_gate) * queries + 2 * groups
    of_attention = {"linear_qkv": projected + model.hidden_size, "linear_proj": queries + model.hidden_size}
    projections = {} if model.mixer is None else model.mixer.projections(model.hidden_size)
    of_mixer = {name: inputs + outputs for name, (inputs, outputs) in projections.items()}
    total = 0
    for layer, (has_experts, has_mixer) in enumerate(zip(model.moe_layers, model.mixer_layers, strict=True)):
        letters = model.hybrid_layer_pattern[layer] if model.hybrid_layer_pattern else "M-"
        if letters[0] in "M*":
            widths = of_mixer if has_mixer else of_attention
            total += sum(widths.get(name, 0) for name in model.lora_target_modules)
        if letters[-1] in "M*":
            continue
        inner = [(1, model.ffn_hidden_size)]
        if has_experts:
            inner = [(model.num_experts, model.moe_ffn_hidden_size), (1, model.moe_shared_expert_intermediate_size)]
        for count, width in inner:
            if width is not None:
                total += count * _feed_forward(model, width)
    return total * model.lora_rank


def _feed_forward(model: ModelConfig, width: int) -> int:
    """Sum of the input and output widths of the adapted matrices of one feed-forward layer."""
    first = model.hidden_size + (2 * width if model.swiglu else width)
    widths = {"linear_fc1": first, "linear_fc2": width + model.hidden_size}
    return sum(widths.get(name, 0) for name in model.lora_target_modules)
