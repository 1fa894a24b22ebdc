"""Settings as typed dataclasses, one module per topic; ``megatron_dta.arguments`` reads them from the command line."""

from megatron_dta.config.agents import AgentConfig
from megatron_dta.config.data import DataConfig
from megatron_dta.config.distillation import DistillationConfig
from megatron_dta.config.model import ModelConfig
from megatron_dta.config.objective import CriticConfig, ObjectiveConfig
from megatron_dta.config.optimization import OptimizationConfig
from megatron_dta.config.output import CheckpointConfig, LoggingConfig
from megatron_dta.config.parallel import ParallelConfig
from megatron_dta.config.sampling import EnvironmentConfig, FilterConfig, RewardConfig, SamplingConfig
from megatron_dta.config.train import TrainConfig
from megatron_dta.config.tree import TreeConfig
from megatron_dta.config.treepo import TreePOConfig

__all__ = [
    "AgentConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DistillationConfig",
    "EnvironmentConfig",
    "FilterConfig",
    "LoggingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizationConfig",
    "ParallelConfig",
    "RewardConfig",
    "SamplingConfig",
    "TrainConfig",
    "TreeConfig",
    "TreePOConfig",
]
