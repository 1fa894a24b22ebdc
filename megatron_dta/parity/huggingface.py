"""The same model in Hugging Face transformers: configuration and weights (or gradients) under its names.

Megatron fuses what Hugging Face keeps apart: query, key and value of each head group in ``linear_qkv``, gate and up
projection in ``linear_fc1``. The mapping is linear, so it carries gradients as it carries weights. It covers the
models that ``check_parity`` builds, in one process, and is no checkpoint converter.

Legend: G key/value heads, R query heads per key/value head, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dta.config import ModelConfig
from megatron_dta.errors import InputError

LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
TOP_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def build_huggingface(model: ModelConfig, weights: dict[str, Tensor]) -> torch.nn.Module:
    """A Llama, Qwen2 or Qwen3 model (no QKV bias or QK-norm, bias, QK-norm) with Megatron's ``weights``, in float32."""
    try:
        import transformers
    except ImportError:
        raise InputError("the reference needs Hugging Face transformers: pip install 'megatron_dta[parity]'") from None
    if model.qk_layernorm and model.add_qkv_bias:
        raise InputError("--qk-layernorm with --add-qkv-bias: no Hugging Face model has both; leave one out")
    family = "Qwen3" if model.qk_layernorm else "Qwen2" if model.add_qkv_bias else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        attention_dropout=0.0,
        attn_implementation="eager",
        use_cache=False,
    )
    # The base lives in ``rope_theta`` up to transformers 4 and in the rope parameters from 5 on.
    if getattr(config, "rope_parameters", None) is not None:
        config.rope_parameters["rope_theta"] = float(model.rotary_base)
    else:
        config.rope_theta = float(model.rotary_base)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).float()
    named = {name: tensor.float() for name, tensor in to_huggingface(weights, model).items()}
    if not model.untie_embeddings_and_output_weights:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    reference.load_state_dict(named, strict=True)
    return reference.to(next(iter(weights.values())).device)


def to_huggingface(tensors: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Megatron's parameters (or their gradients) under Hugging Face's names; a ``KeyError`` names what has no place
    there.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in TOP_NAMES:
            renamed[TOP_NAMES[name]] = tensor
            continue
        _, _, layer, inner = name.split(".", 3)
        prefix = f"model.layers.{layer}."
        if inner in LAYER_NAMES:
            renamed[prefix + LAYER_NAMES[inner]] = tensor
        elif inner.startswith("self_attention.linear_qkv."):
            kind = inner.rsplit(".", 1)[1]
            for part, piece in zip("qkv", _split_qkv(tensor, model), strict=True):
                renamed[f"{prefix}self_attn.{part}_proj.{kind}"] = piece
        elif inner == "mlp.linear_fc1.weight":
            gate, up = tensor.chunk(2)
            renamed[prefix + "mlp.gate_proj.weight"], renamed[prefix + "mlp.up_proj.weight"] = gate, up
        else:
            raise KeyError(f"no Hugging Face name for {name}")
    return renamed


def _split_qkv(tensor: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[G x (R + 2) x D, ...] -> [G x R x D, ...], [G x D, ...], [G x D, ...]."""
    groups, per_group = model.num_query_groups, model.num_attention_heads // model.num_query_groups
    by_group = tensor.unflatten(0, (groups, per_group + 2, model.kv_channels))
    return (
        by_group[:, :per_group].flatten(0, 2),
        by_group[:, per_group].flatten(0, 1),
        by_group[:, per_group + 1].flatten(0, 1),
    )
