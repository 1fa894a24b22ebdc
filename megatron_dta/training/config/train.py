"""``TrainConfig``: all settings of one training run, by topic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any

from megatron_dta.common.secrets import redacted_values
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.objective import CriticConfig, ObjectiveConfig
from megatron_dta.core.config.options import flag_of
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.core.config.tree import TreeConfig
from megatron_dta.core.shapes.mixer import Mixer
from megatron_dta.sampling.config.sampling import EnvironmentConfig, FilterConfig, RewardConfig, SamplingConfig
from megatron_dta.sampling.config.speculation import SpeculationConfig
from megatron_dta.sampling.config.treepo import TreePOConfig
from megatron_dta.training.config.agents import AgentConfig
from megatron_dta.training.config.data import DataConfig
from megatron_dta.training.config.distillation import DistillationConfig
from megatron_dta.training.config.optimization import OptimizationConfig
from megatron_dta.training.config.output import CheckpointConfig, LoggingConfig


@dataclass
class TrainConfig:
    """All settings of ``python -m megatron_dta.train``; each field is one topic and one group of flags."""

    model: ModelConfig
    tree: TreeConfig = field(default_factory=TreeConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    filtering: FilterConfig = field(default_factory=FilterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    treepo: TreePOConfig = field(default_factory=TreePOConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def leaves_memory_open(self) -> bool:
        """Whether no flag bounds the memory of a step, so that a run on GPUs decides it. Packs are cut by tokens."""
        given = (self.tree.tree_memory_gib, self.tree.tree_memory_tokens, self.tree.tree_activation_tokens)
        is_given = any(value is not None for value in (*given, self.model.recompute_granularity))
        return self.tree.tree_mode != "packed" and not is_given


def settings_of(config: TrainConfig) -> Iterator[tuple[str, Field, Any]]:
    """Yield (topic, field, value) for every setting."""
    for topic in fields(config):
        values = getattr(config, topic.name)
        for setting in fields(values):
            yield topic.name, setting, getattr(values, setting.name)


def settings_by_flag(config: TrainConfig) -> dict[str, Any]:
    """Flag -> value for every setting, as it is stored: without credentials, other objects as strings."""
    return {flag_of(setting): redacted_values(stored(value)) for _, setting, value in settings_of(config)}


def stored(value: Any) -> Any:
    """A value as a checkpoint has it."""
    if isinstance(value, Mixer):
        return value.settings
    return value if isinstance(value, type(None) | bool | int | float | str | list) else str(value)
