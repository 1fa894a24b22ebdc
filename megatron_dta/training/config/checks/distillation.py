"""Checks the settings of distillation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dta.training.config.checks.objectives import POLICY_GRADIENT
from megatron_dta.training.config.train import TrainConfig


def check_distillation(config: TrainConfig) -> Iterator[str]:
    """Yield a line for everything that cannot work with teachers."""
    distillation, objective = config.distillation, config.objective
    if not distillation.is_used:
        return
    if objective.objective not in POLICY_GRADIENT:
        yield f"--teacher-load-hf needs a policy gradient, such as --objective grpo, not {objective.objective}"
    if objective.objective == "ppo":
        yield "--teacher-load-hf with --objective ppo: its critic would not know of the teacher; give --objective grpo"
