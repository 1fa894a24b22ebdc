"""Layers with experts under Hugging Face's names: Mixtral, and Qwen3-MoE where queries and keys are normalized.

transformers 4 keeps every expert's matrices apart, transformers 5 stacks those of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dta.config import ModelConfig
from megatron_dta.errors import InputError


def expert_config(model: ModelConfig) -> dict[str, Any]:
    """The entries of a config.json that are about experts; ``InputError`` where neither model has such a router."""
    if (
        model.moe_router_score_function != "softmax"
        or model.moe_router_pre_softmax
        or model.moe_router_group_topk
        or model.moe_router_topk_scaling_factor
        or model.moe_shared_expert_intermediate_size
        or model.add_qkv_bias
        or not all(model.moe_layers)
    ):
        raise InputError("the Hugging Face reference has Mixtral's and Qwen3-MoE's experts only, in every layer")
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


def rename_experts(tensors: dict[str, Tensor], model: ModelConfig, stacked: bool) -> dict[str, Tensor]:
    """Routers and experts among ``tensors`` under Hugging Face's names.

    Args:
        stacked: as transformers 5 has them.
    """
    mixtral = not model.qk_layernorm
    layer_name = "block_sparse_moe" if mixtral and not stacked else "mlp"
    renamed: dict[str, Tensor] = {}
    for layer in range(model.num_layers):
        before, after = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.{layer_name}."
        renamed[after + "gate.weight"] = tensors[before + "router.weight"]
        of_experts = [before + f"experts.local_experts.{expert}." for expert in range(model.num_experts)]
        first = [tensors[expert + "linear_fc1.weight"] for expert in of_experts]
        second = [tensors[expert + "linear_fc2.weight"] for expert in of_experts]
        if stacked:
            renamed[after + "experts.gate_up_proj"] = torch.stack(first)
            renamed[after + "experts.down_proj"] = torch.stack(second)
            continue
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        for expert, (gate_up, out) in enumerate(zip(first, second, strict=True)):
            own = f"{after}experts.{expert}."
            renamed[f"{own}{gate}.weight"], renamed[f"{own}{up}.weight"] = gate_up.chunk(2)
            renamed[f"{own}{down}.weight"] = out
    return renamed


def without_experts(name: str, model: ModelConfig) -> bool:
    """Whether ``rename_experts`` leaves the parameter ``name`` out."""
    return model.num_experts is None or not (".mlp.router." in name or ".mlp.experts." in name)
