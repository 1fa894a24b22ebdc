"""Rejects a shape of the model that cannot be computed."""

from __future__ import annotations

import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig


def check_rotary(model: ModelConfig) -> None:
    """Raise ``InputError`` for rotary positions of half a channel and for bounds of YaRN in the wrong order."""
    rotated = model.rotated_channels
    if rotated == 0 or rotated % 2:
        raise InputError(
            f"rotary_percent {model.rotary_percent} rotates {rotated} of {model.kv_channels} channels per head; this "
            "must be an even number above 0; change it in config.json, or give another --kv-channels"
        )
    if model.yarn_beta_slow > model.yarn_beta_fast:
        raise InputError(
            f"yarn_beta_slow {model.yarn_beta_slow:g} must not be above yarn_beta_fast {model.yarn_beta_fast:g}"
        )


def check_batch_invariant(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ``InputError`` for a model or mesh in which a row's bits would depend on others in spite of the mode."""
    if not model.batch_invariant_mode:
        return
    ranks, flag = parallel.tensor_model_parallel_size, "--tensor-model-parallel-size"
    refused = (
        ("--transformer-impl transformer_engine", model.transformer_impl != "local"),
        ("--lora-rank", model.lora_rank is not None),
        ("layers with another mixer", model.mixer is not None),
        ("models without RMSNorm and SwiGLU", model.normalization != "RMSNorm" or not model.swiglu),
        ("a gate of the shared experts", model.moe_shared_expert_gate),
        ("float16", model.params_dtype == torch.float16),
        ("no_gradient_accumulation_fusion", parallel.no_gradient_accumulation_fusion),
        ("--pipeline-model-parallel-size above 1", parallel.pipeline_model_parallel_size > 1),
        ("--context-parallel-size above 1", parallel.context_parallel_size > 1),
        ("--expert-model-parallel-size above 1", parallel.expert_model_parallel_size > 1),
        (f"{flag} above 2, whose sums have no fixed order", ranks > 2),
        (f"{flag} above 1 with experts", ranks > 1 and model.num_experts is not None),
    )
    for what, is_set in refused:
        if is_set:
            raise InputError(f"--batch-invariant-mode does not support {what}; leave one of them out")
