"""Settings of a run as typed dataclasses; ``training.arguments`` reads them from the command line."""

from megatron_dta.training.config.agents import AgentConfig
from megatron_dta.training.config.data import DataConfig
from megatron_dta.training.config.distillation import DistillationConfig
from megatron_dta.training.config.optimization import OptimizationConfig
from megatron_dta.training.config.output import CheckpointConfig, LoggingConfig
from megatron_dta.training.config.train import TrainConfig

__all__ = [
    "AgentConfig",
    "CheckpointConfig",
    "DataConfig",
    "DistillationConfig",
    "LoggingConfig",
    "OptimizationConfig",
    "TrainConfig",
]
