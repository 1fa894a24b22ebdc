"""The settings of a run that its sampling reads."""

from __future__ import annotations

from typing import Protocol

from megatron_dta.sampling.config.sampling import EnvironmentConfig, FilterConfig, RewardConfig, SamplingConfig
from megatron_dta.sampling.config.treepo import TreePOConfig


class _Steps(Protocol):
    seed: int
    train_iters: int


class _Evaluations(Protocol):
    eval_iters: int


class SampledRun(Protocol):
    """The part of ``TrainConfig`` that sampling reads."""

    sampling: SamplingConfig
    treepo: TreePOConfig
    environment: EnvironmentConfig
    reward: RewardConfig
    filtering: FilterConfig
    optimization: _Steps
    logging: _Evaluations
