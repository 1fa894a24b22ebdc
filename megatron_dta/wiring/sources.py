"""Builds the source of sampled rollouts, a chain of small transforms, and the evaluation on held-out prompts.

independent rollouts (``sources.independent``), trees and episodes with an environment (``treepo.source``), or sessions
of agents (``agents.source``)
-> over-sampling, dynamic sampling and overlong shaping (``sources.filters``), in this process on all ranks
-> rank 0's thread, broadcast to all (``sources.rank0_source``): servers

With ``--rollout-max-staleness`` there is one source instead, ``servers.stream``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.extras.agents.service import AgentService
from megatron_dta.extras.agents.source import AgentEvaluation, AgentSource
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.stream.group_sampler import GroupSampler
from megatron_dta.extras.servers.stream.rollout_stream import StreamLimits
from megatron_dta.extras.servers.stream.stream_source import StreamSource
from megatron_dta.extras.servers.weights.send import rollout_weights
from megatron_dta.sampling.interface import RolloutEngine
from megatron_dta.sampling.sources.batch_source import Evaluation, RolloutSource, SampledSource
from megatron_dta.sampling.sources.filters import FilteringSource
from megatron_dta.sampling.sources.independent import SamplingEvaluation, SamplingSource
from megatron_dta.sampling.sources.rank0_source import Rank0Evaluation, Rank0Source
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.sampling.treepo.source import TreeEvaluation, TreeSource
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.loop import Progress
from megatron_dta.wiring.engines import build_drafting, build_engine, server_engine


def build_sampled_data(
    config: TrainConfig, model: Model, task: SamplingTask, progress: Progress, report: Callable[[str], None]
) -> tuple[RolloutSource, list[Evaluation]]:
    """Build the source of training rollouts and, with ``--eval-interval``, the evaluation on held-out prompts.

    Args:
        progress: the run's progress, which the source reads while it advances.
        report: called with a line when a server is lost, and when a GPU decodes without CUDA graphs.
    """
    evaluated = config.logging.eval_interval is not None
    if config.sampling.rollout_engine == "in-process":
        drafting = build_drafting(config)
        stop, impl = config.speculation.rollout_stop_degenerate, config.tree.tree_attention_impl
        engine = build_engine(config.sampling, model, drafting, stop, impl, report)
        agents = _agents(engine, task, config)
        source = build_sampling_source(engine, task, config, agents)
        return source, [build_sampling_evaluation(engine, task, config, agents)] if evaluated else []
    first = current_mesh().rank == 0
    engine = server_engine(config, report) if first else None
    if config.sampling.rollout_max_staleness:
        return _stream(config, model, task, progress, engine)
    agents = _agents(engine, task, config) if first else None
    inner = build_sampling_source(engine, task, config, agents) if first else None
    source = Rank0Source(inner, engine, rollout_weights(config, model), lambda: progress.iteration)
    if not evaluated:
        return source, []
    evaluation = build_sampling_evaluation(engine, task, config, agents) if first else None
    return source, [Rank0Evaluation(evaluation, source)]


def _stream(
    config: TrainConfig, model: Model, task: SamplingTask, progress: Progress, engine: HttpEngine | None
) -> tuple[RolloutSource, list[Evaluation]]:
    """The source of ``--rollout-max-staleness``, and the evaluation; ``engine`` is None on all ranks but the first."""
    sampling = config.sampling
    limits = StreamLimits(
        sampling.rollout_batch_size,
        steps_per_rollout_batch(config),
        sampling.rollout_max_staleness,
        _num_rollout_batches(config, progress),
    )
    seed = config.optimization.seed
    sampler = None if engine is None else GroupSampler(engine, task, sampling, seed)
    source = StreamSource(sampler, engine, rollout_weights(config, model), lambda: progress.iteration, limits)
    if config.logging.eval_interval is None:
        return source, []
    evaluation = None if engine is None else build_sampling_evaluation(engine, task, config)
    return source, [Rank0Evaluation(evaluation, source)]


def _agents(engine: RolloutEngine, task: SamplingTask, config: TrainConfig) -> AgentService | None:
    """The agents of the flags, which training and evaluation share; None without any."""
    return AgentService(engine, task, config) if config.agent.is_used else None


def build_sampling_source(
    engine: RolloutEngine, task: SamplingTask, config: TrainConfig, agents: AgentService | None = None
) -> RolloutSource:
    """The source of rollouts from ``engine``, without what depends on the kind of engine."""
    sampling, filtering = config.sampling, config.filtering
    trained = sampling.rollout_batch_size
    sampled = max(trained, sampling.over_sampling_batch_size or 0)
    source_config = replace(config, sampling=replace(sampling, rollout_batch_size=sampled))
    source: SampledSource
    if config.agent.is_used:
        source = AgentSource(engine, task, source_config, agents)
    elif config.treepo.rollout_method == "treepo" or config.environment.environment is not None:
        source = TreeSource(engine, task, source_config)
    else:
        source = SamplingSource(engine, task, source_config.sampling, config.optimization.seed)
    if sampled > trained or filtering.dynamic_sampling or filtering.overlong_buffer_len is not None:
        return FilteringSource(source, config)
    return source


def build_sampling_evaluation(
    engine: RolloutEngine, task: SamplingTask, config: TrainConfig, agents: AgentService | None = None
) -> Evaluation:
    """The evaluation on held-out prompts; it samples independent rollouts for every training method."""
    if agents is not None:
        return AgentEvaluation(task, config, agents)
    if config.environment.environment is not None:
        return TreeEvaluation(engine, task, config)
    return SamplingEvaluation(engine, task, config.sampling, config.optimization.seed, config.logging.eval_iters)


def _num_rollout_batches(config: TrainConfig, progress: Progress) -> int:
    """Total number of rollout batches that the run will have used when it ends."""
    left = config.optimization.train_iters - progress.iteration - len(progress.waiting)
    return progress.rollout_batches + max(0, math.ceil(left / steps_per_rollout_batch(config)))


def steps_per_rollout_batch(config: TrainConfig) -> int:
    """Number of optimizer steps that train one rollout batch."""
    return config.sampling.num_steps_per_rollout * config.objective.ppo_epochs
