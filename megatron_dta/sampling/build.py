"""Builds the source and the evaluation of sampled rollouts from the flags.

Independent rollouts of one turn come from ``sources.independent``. Trees (``--rollout-method treepo``) and rollouts
with an environment, which are also trees, come from ``treepo.source``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_dta.config import FilterConfig, TrainConfig
from megatron_dta.rollouts.batch_source import Evaluation, RolloutSource, SampledSource
from megatron_dta.sampling.engines.interface import RolloutEngine
from megatron_dta.sampling.sources.dapo_filter import FilteringSource
from megatron_dta.sampling.sources.independent import SamplingEvaluation, SamplingSource
from megatron_dta.sampling.sources.over_sampling import DynamicSamplingSource
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.sampling.treepo.source import TreeEvaluation, TreeSource


def build_sampling_source(engine: RolloutEngine, task: SamplingTask, config: TrainConfig) -> RolloutSource:
    """The source of the rollouts for training."""
    if config.filtering.dynamic_sampling or config.filtering.overlong_buffer_len is not None:
        return FilteringSource(_sampled_source(engine, task, replace(config, filtering=FilterConfig())), config)
    return _sampled_source(engine, task, config)


def _sampled_source(engine: RolloutEngine, task: SamplingTask, config: TrainConfig) -> SampledSource:
    trained, sampled = config.sampling.rollout_batch_size, config.sampling.over_sampling_batch_size
    if sampled is not None and sampled > trained:
        sampling = replace(config.sampling, rollout_batch_size=sampled, over_sampling_batch_size=None)
        return DynamicSamplingSource(_sampled_source(engine, task, replace(config, sampling=sampling)), trained)
    if config.treepo.rollout_method == "treepo" or config.environment.environment is not None:
        return TreeSource(engine, task, config)
    return SamplingSource(engine, task, config.sampling, config.optimization.seed)


def build_sampling_evaluation(engine: RolloutEngine, task: SamplingTask, config: TrainConfig) -> Evaluation:
    """The evaluation on held-out prompts; it samples independent rollouts for every training method."""
    if config.environment.environment is not None:
        return TreeEvaluation(engine, task, config)
    return SamplingEvaluation(engine, task, config.sampling, config.optimization.seed, config.logging.eval_iters)
