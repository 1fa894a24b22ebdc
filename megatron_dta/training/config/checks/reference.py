"""Checks of the reference model."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.objective import ObjectiveConfig
from megatron_dta.training.config.output import CheckpointConfig


def check_reference(model: ModelConfig, objective: ObjectiveConfig, checkpoint: CheckpointConfig) -> None:
    """Raise ``InputError`` if the reference model does not exist or is given twice."""
    if checkpoint.ref_load is not None and checkpoint.ref_model is not None:
        raise InputError(f"--ref-load conflicts with --ref-model {checkpoint.ref_model}; keep one of them")
    if checkpoint.ref_model == "base" and model.lora_rank is None:
        raise InputError("--ref-model base needs --lora-rank: without adapters all weights are trained")
    if objective.offload_reference and checkpoint.reference_is_base(model.lora_rank is not None):
        raise InputError(
            "--offload-reference has no effect if the reference model is the base of --lora-rank, which needs no copy; "
            "leave it out, or give --ref-model initial"
        )
