"""Rejects settings of LoRA adapters that conflict, with a line that names the flag and the fix."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.derived.pipeline_layout import stage_layers
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig


def check_lora(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ``InputError`` for adapters with which the model cannot be built."""
    if model.lora_rank is None:
        return
    targets = model.lora_target_modules or []
    for name in targets:
        if name not in model.lora_targets:
            raise InputError(f"--lora-target-modules {name}: choose from {', '.join(model.lora_targets)}")
    if len(set(targets)) < len(targets):
        raise InputError(f"--lora-target-modules {' '.join(targets)}: one is repeated; name each once")
    stages = parallel.pipeline_model_parallel_size
    layers = stage_layers(model, parallel)
    for stage in range(stages):
        if sum(layers[stage::stages]) == 0:
            raise InputError(
                f"--pipeline-model-parallel-layout {parallel.pipeline_model_parallel_layout}: stage {stage} has no "
                "layer, so with --lora-rank it has nothing to train; give it a layer"
            )
    if model.num_experts is not None:
        _check_experts(model, parallel, targets)


def _check_experts(model: ModelConfig, parallel: ParallelConfig, targets: list[str]) -> None:
    if model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate:
        raise InputError(
            "--moe-router-enable-expert-bias would change the base weights under the adapters of --lora-rank; "
            "add --moe-router-bias-update-rate 0"
        )
    feed_forward = [name for name in targets if name.startswith("linear_fc")]
    if not feed_forward:
        return
    others = [name for name in model.lora_targets if not name.startswith("linear_fc")]
    alone = f"--lora-target-modules {' '.join(others)}"
    if parallel.expert_tensor_size > 1:
        raise InputError(
            f"--lora-target-modules {feed_forward[0]}: experts divided over {parallel.expert_tensor_size} ranks cannot "
            f"be adapted; give --expert-tensor-parallel-size 1, or {alone}"
        )
