"""Checks of the reference model."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.objective import ObjectiveConfig
from megatron_dta.training.config.output import CheckpointConfig


def check_reference(model: ModelConfig, objective: ObjectiveConfig, checkpoint: CheckpointConfig) -> None:
    """Raise ``InputError`` if there is no copy of the reference model to offload."""
    if objective.offload_reference and checkpoint.reference_is_base(model.lora_rank is not None):
        raise InputError(
            "--offload-reference has no effect if the reference model is the base of --lora-rank, which needs no copy; "
            "leave it out"
        )
