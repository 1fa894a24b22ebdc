"""Rejects settings of experts that conflict or cannot be exact, with a line that names the flag and the fix."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig


def check_experts(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ``InputError`` for settings with which an expert model cannot be built."""
    if model.num_experts is None:
        return
    _check_router(model)
    _ = model.moe_layers  # raises if the pattern does not match the number of layers
    if not model.disable_bias_linear:
        raise InputError("--num-experts needs --disable-bias-linear: Megatron's experts cannot train a bias; add it")
    _check_division(model, parallel)


def _check_router(model: ModelConfig) -> None:
    experts, topk = model.num_experts, model.moe_router_topk
    groups, limit = model.moe_router_num_groups, model.moe_router_group_topk
    if topk > experts:
        raise InputError(f"--moe-router-topk {topk} is more than --num-experts {experts}; lower it")
    if topk == 1 and model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax:
        raise InputError(
            "--moe-router-topk 1 needs --moe-router-score-function sigmoid: a softmax over one expert is always 1, and "
            "the router would learn nothing"
        )
    if (groups is None) != (limit is None):
        raise InputError("moe_router_num_groups and moe_router_group_topk need each other; give both or neither")
    if groups is not None:
        if experts % groups:
            raise InputError(f"--num-experts {experts} is not divisible by moe_router_num_groups {groups}")
        if limit > groups or topk % limit or topk // limit > experts // groups:
            raise InputError(
                f"--moe-router-topk {topk} cannot be spread evenly over moe_router_group_topk {limit} of {groups} "
                f"groups of {experts // groups} experts; change one of them"
            )
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        raise InputError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid")


def _check_division(model: ModelConfig, parallel: ParallelConfig) -> None:
    tensor, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    expert_tensor = parallel.expert_tensor_size
    if model.num_experts % experts:
        raise InputError(
            f"--expert-model-parallel-size {experts} does not divide --num-experts {model.num_experts}; lower it to a "
            f"divisor of {model.num_experts}"
        )
    if tensor > 1 and not parallel.sequence_parallel:
        raise InputError("--num-experts with --tensor-model-parallel-size above 1 needs --sequence-parallel")
    if (expert_tensor * experts) % tensor and tensor % (expert_tensor * experts):
        raise InputError(
            f"--expert-model-parallel-size {experts} x --expert-tensor-parallel-size {expert_tensor} neither divides "
            f"--tensor-model-parallel-size {tensor} nor is a multiple of it; change one of them"
        )
    if model.moe_ffn_hidden_size % expert_tensor:
        raise InputError(
            f"--expert-tensor-parallel-size {expert_tensor} does not divide --moe-ffn-hidden-size "
            f"{model.moe_ffn_hidden_size}; lower it to a divisor"
        )
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % tensor:
        raise InputError(
            f"--tensor-model-parallel-size {tensor} does not divide --moe-shared-expert-intermediate-size {shared}"
        )
