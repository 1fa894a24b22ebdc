"""Builds the source of sampled rollouts and the evaluation for the engine that ``--rollout-engine`` names.

The in-process engine runs on all ranks with the weights being trained. Only rank 0 uses servers and recorded rollouts;
it distributes their rollouts to all ranks (``sampling.sources.rank0_source``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_dta.config import TrainConfig
from megatron_dta.model import Model, current_mesh
from megatron_dta.rollouts.batch_source import Evaluation, RolloutSource
from megatron_dta.sampling.build import build_sampling_evaluation, build_sampling_source
from megatron_dta.sampling.engines.build import build_drafting, build_engine, replay_engine, server_engine
from megatron_dta.sampling.engines.in_process.pass_costs import measure_passes
from megatron_dta.sampling.engines.interface import RolloutEngine
from megatron_dta.sampling.sources.independent import sampling_params
from megatron_dta.sampling.sources.rank0_source import Rank0Evaluation, Rank0Source
from megatron_dta.sampling.sources.server_corpus import DraftingServersSource, RolloutCorpus
from megatron_dta.sampling.sources.speculating_source import SpeculatingSource
from megatron_dta.sampling.sources.stopping_source import StoppingSource
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.training.data.stored import load_files
from megatron_dta.training.loop import Progress
from megatron_dta.training.weights.servers import RolloutWeights, weights_folder


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
        source = build_sampling_source(engine, task, config)
        if stop:
            source = StoppingSource(source, engine)
        if drafting is not None:
            if drafting.follows_clock:
                rows = min(config.sampling.inference_max_requests, _responses_of_a_replica(config))
                params = sampling_params(task, config.sampling, config.optimization.seed)
                drafting.learn_costs(measure_passes(engine, params, rows, model.max_sequence_length))
            source = SpeculatingSource(source, drafting)
        return source, [build_sampling_evaluation(engine, task, config)] if evaluated else []
    is_replay = config.sampling.rollout_engine == "replay"
    first = current_mesh().rank == 0
    engine = None
    if first:
        engine = _replay(config) if is_replay else server_engine(config, report)
    inner = build_sampling_source(engine, task, config) if first else None
    if first and config.speculation.rollout_speculation == "das":
        corpus = None
        if config.sampling.rollout_engine == "sglang":
            das = config.speculation
            corpus = RolloutCorpus(weights_folder(config), task.tokenizer, das.das_window, das.das_max_tokens)
        inner = DraftingServersSource(inner, engine, corpus)
    source = Rank0Source(
        inner,
        engine,
        None if is_replay else RolloutWeights(config, model),
        lambda: progress.iteration,
        steps_per_rollout_batch(config),
        config.sampling.rollout_max_staleness,
        _num_rollout_batches(config, progress),
    )
    if not evaluated:
        return source, []
    return source, [Rank0Evaluation(build_sampling_evaluation(engine, task, config) if first else None, source)]


def _responses_of_a_replica(config: TrainConfig) -> int:
    """Largest number of responses that a data-parallel replica samples at the same time."""
    sampling = config.sampling
    prompts = max(sampling.rollout_batch_size, sampling.over_sampling_batch_size or 0)
    return -(-prompts * sampling.n_samples_per_prompt // current_mesh().data_size)


def _replay(config: TrainConfig) -> RolloutEngine:
    needed = config.objective.needs_rollout_logprobs
    return replay_engine(load_files(config.sampling.rollout_replay or [], config), needed)


def _num_rollout_batches(config: TrainConfig, progress: Progress) -> int:
    """Total number of rollout batches that the run will have used when it ends."""
    left = config.optimization.train_iters - progress.iteration - len(progress.waiting)
    return progress.rollout_batches + max(0, math.ceil(left / steps_per_rollout_batch(config)))


def steps_per_rollout_batch(config: TrainConfig) -> int:
    """Number of optimizer steps that train one rollout batch."""
    return config.sampling.num_steps_per_rollout * config.objective.ppo_epochs
