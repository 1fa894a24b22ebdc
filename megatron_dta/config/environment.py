"""Multi-turn rollouts: the environment that answers the model's turns."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class EnvironmentConfig:
    """Settings of ``megatron_dta.sampling.treepo.environment``."""

    environment: str | None = option(
        None,
        "Class whose reset and step answer the model's turns and give the rewards: FILE.py:NAME or a dotted name.",
    )
    environment_max_turns: int | None = option(None, "Most turns of a rollout (default: as many as fit).", minimum=1)
    environment_timeout: float = option(60.0, "Seconds that a step of the environment may take.", above=0)
    environment_workers: int = option(16, "Steps of environments that run at once.", minimum=1)
    environment_failure: str = option(
        "end",
        "A step that raises or takes too long ends its rollout, which is trained with the reward so far (end) or left "
        "out of training and of its group (drop), or stops the run; it is counted.",
        choices=("end", "drop", "stop"),
    )
