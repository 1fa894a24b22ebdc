"""Settings of sampling as typed dataclasses."""

from megatron_dta.sampling.config.sampling import EnvironmentConfig, FilterConfig, RewardConfig, SamplingConfig
from megatron_dta.sampling.config.speculation import SpeculationConfig
from megatron_dta.sampling.config.treepo import TreePOConfig

__all__ = ["EnvironmentConfig", "FilterConfig", "RewardConfig", "SamplingConfig", "SpeculationConfig", "TreePOConfig"]
