"""Checks the dtypes and the placement of optimizer states, and FP8, against what Megatron supports.

``check_states`` needs only the settings. ``check_state_support`` inspects the machine; only training processes call it,
because a login node has no GPU.
"""

from __future__ import annotations

import importlib.util

import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.checks.transformer_engine import check_fp8, check_fp8_support
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.options import flag_of
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.training.config.optimization import OptimizationConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def check_states(model: ModelConfig, optimization: OptimizationConfig, parallel: ParallelConfig) -> None:
    """Raise ``InputError`` for settings of optimizer states and FP8 that conflict."""
    aware, offload = optimization.use_precision_aware_optimizer, optimization.optimizer_cpu_offload
    if offload and not aware:
        raise InputError("--optimizer-cpu-offload needs --use-precision-aware-optimizer; add it")
    if aware and not parallel.use_distributed_optimizer:
        raise InputError("--use-precision-aware-optimizer needs --use-distributed-optimizer; add it")
    if aware and not model.bf16:
        raise InputError(
            "--use-precision-aware-optimizer needs --bf16: float32 weights are their own master weights; add --bf16"
        )
    for name in _STATE_DTYPES:
        if offload and getattr(optimization, name) != "fp32":
            flag = flag_of(OptimizationConfig.__dataclass_fields__[name])
            raise InputError(
                f"{flag} {getattr(optimization, name)}: with --optimizer-cpu-offload the states are float32; leave "
                "one of them out"
            )
    check_fp8(model, parallel)


def check_state_support(model: ModelConfig, optimization: OptimizationConfig) -> None:
    """Raise ``InputError`` for settings that this machine or its packages do not support."""
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    if model.fp8_format is not None and not has_engine:
        raise InputError("--fp8-format needs the package transformer_engine, which is not installed; leave it out")
    check_fp8_support(model)
    if optimization.optimizer_cpu_offload:
        if not torch.cuda.is_available():
            raise InputError("--optimizer-cpu-offload needs a CUDA GPU, and there is none; leave it out")
    elif optimization.use_precision_aware_optimizer and not has_engine:
        raise InputError(
            "--use-precision-aware-optimizer needs the package transformer_engine (its Adam), which is not installed; "
            "leave it out, or add --optimizer-cpu-offload"
        )
