"""Settings of the engine as typed dataclasses: model, mesh, trees and objective."""

from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.objective import CriticConfig, ObjectiveConfig
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.core.config.tree import TreeConfig

__all__ = ["CriticConfig", "ModelConfig", "ObjectiveConfig", "ParallelConfig", "TreeConfig"]
