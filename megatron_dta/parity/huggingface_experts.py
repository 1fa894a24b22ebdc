"""Layers with experts under Hugging Face's names: Mixtral, and Qwen3-MoE where queries and keys are normalized.

transformers 4 keeps every expert's matrices apart, transformers 5 stacks those of a layer.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from megatron_dta.config import ModelConfig
from megatron_dta.errors import InputError

_EXPERT = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<kind>\w+)\.weight")
_KINDS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


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


def experts_are_stacked() -> bool:
    """Whether the installed transformers keeps a layer's experts in two tensors."""
    import transformers

    return int(transformers.__version__.split(".")[0]) >= 5


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` under a checkpoint's names as transformers 5 has them in memory: a layer's experts in two tensors."""
    found: dict[str, Tensor] = {}
    of_layers: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        parts = _EXPERT.fullmatch(name)
        if parts is None:
            found[name] = tensor
        else:
            of_expert = of_layers.setdefault(parts["layer"], {}).setdefault(int(parts["expert"]), {})
            of_expert[_KINDS[parts["kind"]]] = tensor
    for layer, experts in of_layers.items():
        ordered = [experts[expert] for expert in range(len(experts))]
        found[f"{layer}.gate_up_proj"] = torch.stack([torch.cat([each["gate"], each["up"]]) for each in ordered])
        found[f"{layer}.down_proj"] = torch.stack([each["down"] for each in ordered])
    return found
