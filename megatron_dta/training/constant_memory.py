"""Counts a rank's bytes that are constant within a step: weights, gradients, optimizer states, FP8 weight copies."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_dta.core.planning.costs.element_bytes import optimizer_bytes
from megatron_dta.training.config import OptimizationConfig


def constant_bytes(
    model_chunks: Iterable[torch.nn.Module], settings: OptimizationConfig | None = None, optimizer_ranks: int = 1
) -> float:
    """Constant bytes of a model's chunks on this rank's device.

    Args:
        model_chunks: the model chunks of one model, wrapped in Megatron's data parallelism if it is trained.
        settings: settings of the model's optimizer; None if it has no optimizer.
        optimizer_ranks: number of data-parallel ranks that share the optimizer states
            (``--use-distributed-optimizer``), otherwise 1.
    """
    total = 0.0
    for chunk in model_chunks:
        total += sum(getattr(module, "quantized_bytes", 0) for module in chunk.modules())
        for parameter in chunk.parameters():
            count = parameter.numel()
            total += count * parameter.element_size()
            if not parameter.requires_grad:
                continue
            gradient = getattr(parameter, "main_grad", None)
            total += count * (parameter if gradient is None else gradient).element_size()
            if settings is not None:
                total += count * state_bytes(settings, parameter.dtype) / optimizer_ranks
    return total


def state_bytes(settings: OptimizationConfig, dtype: torch.dtype) -> float:
    """Bytes of moments and master weight on the device for each parameter of ``dtype``."""
    dtypes = settings.main_params_dtype, settings.exp_avg_dtype, settings.exp_avg_sq_dtype
    on_host = settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0
    return optimizer_bytes(dtype.itemsize, *dtypes) * (1 - on_host)
