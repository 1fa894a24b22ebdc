"""Builds a ``Trainer`` from the settings: reads the data, builds the model, then loads the starting weights or state.

Invalid input is reported here, before the first step. Rollouts and prompts are read and checked before the model is
built.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import without_lora
from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.kv_offload.copy_speed import check_copies, copy_rate
from megatron_dta.sampling.prompts.tokenizer import Tokenizer
from megatron_dta.sampling.sources.batch_source import Evaluation
from megatron_dta.sampling.task import SamplingTask, build_task
from megatron_dta.training.autotune import Autotuner, build_autotuner
from megatron_dta.training.checkpoint.files import remove_leftovers, required_checkpoint, starting_point
from megatron_dta.training.checkpoint.finished import already_at
from megatron_dta.training.checkpoint.random_state import seed_random_states
from megatron_dta.training.checkpoint.run_folders import lock_run, run_folders
from megatron_dta.training.checkpoint.save_load import (
    REFERENCE,
    has_adapters,
    load_checkpoint,
    load_weights,
    save_base,
    save_weights,
)
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.optimizer_states import check_state_support
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.critic import Critic, build_critic_model
from megatron_dta.training.data.prepare import SamplePreparation
from megatron_dta.training.data.stored import (
    StoredEvaluation,
    StoredRollouts,
    check_text_flags,
    load_files,
    load_stored_rollouts,
    stored_tokenizer,
    text_reader,
)
from megatron_dta.training.data.template_date import with_template_date
from megatron_dta.training.huggingface.save import check_save_hf, load_hf
from megatron_dta.training.loop import Progress, Trainer
from megatron_dta.training.monitor.metrics import check_loggers, lost_records
from megatron_dta.training.monitor.run_description import BuiltRun, describe_run, parameter_counts
from megatron_dta.training.monitor.start_clock import mark
from megatron_dta.training.optimizer.build import TrainingOptimizer
from megatron_dta.training.teachers import Teachers
from megatron_dta.training.weights.reference import Reference
from megatron_dta.wiring.engines import listed_servers
from megatron_dta.wiring.outputs import metrics_path, open_metrics, open_rollout_files, tokenizer_of
from megatron_dta.wiring.sources import build_sampled_data
from megatron_dta.wiring.teachers import build_teachers


def build_trainer(config: TrainConfig, console: Console) -> Trainer:
    """Build all components of the run that ``config`` describes and load its initial state."""
    check_state_support(config.model, config.optimization)
    check_loggers(config.logging)
    check_save_hf(config)
    listed_servers(config)  # before the weights are loaded, which may take minutes
    with run_folders(config):
        config, device = with_template_date(config, lambda line: console.print(line, soft_wrap=True, markup=False))
        return _build_trainer(config, device, console)


def _build_trainer(config: TrainConfig, device: torch.device | None, console: Console) -> Trainer:
    objective = make_objective(config.objective)
    stored, held_out, task = read_data(config, objective)
    for line in task.notes if task is not None else ():
        console.print(line, soft_wrap=True)
    config = with_known_sizes(config, task)
    mark("data")
    device = device or initialize_parallel(config.optimization.seed, config.parallel)
    seed_random_states(config.optimization.seed)
    if config.optimization.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    mark("process groups")
    model = build_model(config.model, device, config.parallel)
    lock = lock_run(config, console)
    if config.checkpoint.save is not None:
        if current_mesh().rank == 0:
            remove_leftovers(config.checkpoint.save)
        current_mesh().wait_for_all()
    start, resumes = starting_point(config.checkpoint)
    if not resumes:
        _load_first_weights(config, model, start, console)
    # The reference is built before the checkpoint is loaded, so that without --ref-load it gets the initial weights.
    reference = _build_reference(config, objective, model, device, resumes)
    critic = Critic(config, build_critic_model(config, model, device, resumes)) if objective.needs_critic else None
    optimizer = TrainingOptimizer(model, config.optimization, config.parallel)
    progress, source_state, planning = Progress(), {}, {}
    if start is not None and resumes:
        iteration, state, changed = load_checkpoint(start, config, model, optimizer, critic)
        progress = Progress.from_state_dict(iteration, state)
        source_state, planning = state.get("source", {}), state.get("planning", {})
        _report_continuation(start, iteration, changed, config, console)
    mark("model and weights")
    resumes = start is not None and config.checkpoint.save is not None and start.parent == Path(config.checkpoint.save)
    if not resumes:
        save_base(config, model)
    # A new run starts a new metrics file, including the record before the first step.
    kept_metrics = progress.iteration if start is not None and resumes else -1
    engine = _engine(config, optimizer.chunks, config.model.moe_routing_replay is not None)
    teachers = build_teachers(config, device, engine, lambda chunks: _engine(config, chunks))
    constant = _constant_bytes(config, optimizer, _frozen_models(reference, teachers, config), critic)
    tuner = _tuner(config, engine, constant, (optimizer, critic), _frozen_models(reference, teachers))
    tuner.load_state_dict(planning)
    if task is not None:
        if reach := getattr(task.reward_function, "reach", ""):
            console.print(reach, soft_wrap=True)
        source, evaluations = build_sampled_data(
            config, model, task, progress, lambda line: console.print(line, soft_wrap=True, style="yellow")
        )
        source.load_state_dict(source_state)
    else:
        source, evaluations = stored, _evaluations(config, engine, held_out)
    passes = _reference(config, objective, reference, optimizer.chunks)
    lines = _description(config, optimizer, constant, tuner.describe(), task, stored)
    for line in _copies(config, engine, resumes) + lines:
        console.print(line, soft_wrap=True)
    mark("engines")
    return Trainer(
        config=config,
        model=model,
        engine=engine,
        optimizer=optimizer,
        objective=objective,
        source=source,
        tuner=tuner,
        preparation=SamplePreparation(config, objective, engine, passes, critic and critic.engine, teachers),
        evaluations=evaluations,
        metrics=open_metrics(config, kept_metrics),
        progress=progress,
        console=console,
        critic=critic,
        teachers=teachers,
        rollout_files=open_rollout_files(config, task),
        resumed=start is not None and resumes,
        end_id=task.tokenizer.eos_id if task is not None else stored.end_id,
        saved_iteration=progress.iteration if resumes else None,
        lock=lock or nullcontext(),
    )


def _report_continuation(
    start: Path, iteration: int, changed: list[str], config: TrainConfig, console: Console
) -> None:
    """Print where the run resumes and what has changed since then."""
    console.print(f"continuing {start} after step {iteration}", soft_wrap=True)
    if not console.quiet and config.checkpoint.save is not None and start.parent == Path(config.checkpoint.save):
        changed = [*changed, *filter(None, [lost_records(metrics_path(config), iteration)])]
    for line in changed:
        console.print(f"changed since the checkpoint: {line}", soft_wrap=True, style="yellow")
    if iteration >= config.optimization.train_iters:
        console.print(already_at(iteration, config.optimization.train_iters), soft_wrap=True)


def _tuner(
    config: TrainConfig,
    engine: TreeEngine,
    constant: float,
    trained: tuple[TrainingOptimizer, Critic | None],
    frozen: Sequence[torch.nn.Module],
) -> Autotuner:
    """Limit the engine's memory as the flags say, and decide what they leave open."""
    if config.tree.tree_memory_gib is not None:
        engine.limit_memory(config.tree.tree_memory_gib, constant)
    optimizer, critic = trained
    optimizers = [optimizer] if critic is None else [optimizer, critic.optimizer]
    return build_autotuner(config, engine, constant, optimizers, frozen)


def _description(
    config: TrainConfig,
    optimizer: TrainingOptimizer,
    constant: float,
    decided: str | None,
    task: SamplingTask | None,
    stored: StoredRollouts | None,
) -> list[str]:
    """The lines that describe the run.

    Args:
        constant: bytes of the run's constant memory on this rank.
        decided: the limit of a step's memory that was decided from what the GPU has, if so.
    """
    mesh, part = current_mesh(), next(optimizer.chunks[0].parameters())
    counts = parameter_counts(optimizer.chunks, mesh, config)
    rollouts = stored.rollouts if stored is not None else []
    named, metrics = tokenizer_of(config, task), metrics_path(config)
    built = BuiltRun(config, mesh, part.device, *counts, constant, task, named, rollouts, metrics, decided)
    return [f"{name:<12} {text}" for name, text in describe_run(built)]


def _copies(config: TrainConfig, engine: TreeEngine, resumes: bool) -> list[str]:
    """The lines about keys and values on the host; raises ``InputError`` if computation cannot hide their copies."""
    measure = None if config.optimization.deterministic_mode else copy_rate
    return check_copies(engine, config.tree.tree_segment_tokens, measure, resumes)


def _load_first_weights(config: TrainConfig, model: Model, start: Path | None, console: Console) -> None:
    """Load the initial weights of a new run from ``start`` or --load-hf; otherwise keep the random weights."""
    if start is not None:
        load_weights(start, config.model, model, not config.checkpoint.skip_checkpoint_checks)
    elif config.checkpoint.load_hf is not None:
        load_hf(config, model)
    source = start or config.checkpoint.load_hf
    weights = f"the weights of {source}" if source is not None else f"random weights, seed {config.optimization.seed}"
    console.print(f"starting from {weights}", soft_wrap=True)


def build_loaded_model(config: TrainConfig, tokenizer: Tokenizer, checkpoint: Path | None) -> Model:
    """Build the model with the weights of ``checkpoint`` or, without one, of --load-hf, for sampling alone."""
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    device = initialize_parallel(config.optimization.seed, config.parallel)
    model = build_model(config.model, device, config.parallel)
    if checkpoint is not None:
        load_weights(checkpoint, config.model, model, not config.checkpoint.skip_checkpoint_checks)
    else:
        load_hf(config, model)
    return model


def with_known_sizes(config: TrainConfig, task: SamplingTask | None) -> TrainConfig:
    """Fill in the vocabulary size from the tokenizer and the loss length from the longest sequence."""
    if config.model.vocab_size is None:
        tokenizer = task.tokenizer if task is not None else stored_tokenizer(config)
        config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    if config.objective.loss_aggregation == "sequence-sum" and config.objective.loss_length is None:
        stored = config.data.seq_length or config.model.max_position_embeddings
        length = float(stored if config.data.rollouts else config.sampling.rollout_max_response_len)
        config = replace(config, objective=replace(config.objective, loss_length=length))
    return config


def read_data(
    config: TrainConfig, objective: Objective
) -> tuple[StoredRollouts | None, list[Rollout], SamplingTask | None]:
    """Read the data that the settings ask for.

    Returns:
        the stored rollouts or None, the held-out rollouts, and the sampling task or None.
    """
    if not config.data.rollouts:
        model = config.model
        checkpoint = config.checkpoint.hf_checkpoint or config.checkpoint.load
        task = build_task(config.sampling, model.max_position_embeddings, model.vocab_size, config.reward, checkpoint)
        if config.logging.eval_interval and not task.eval_prompts:
            raise InputError("--eval-interval needs held-out prompts: give --eval-prompt-data")
        return None, [], task
    check_text_flags(config)
    text = text_reader(config)
    held_out = load_files(config.data.eval_rollouts or [], config, (), text)[: config.logging.eval_iters]
    return load_stored_rollouts(config, objective, text), held_out, None


def _build_reference(
    config: TrainConfig, objective: Objective, policy: Model, device: torch.device, resumes: bool
) -> Model | None:
    """Build the frozen reference model; None if the objective needs none or the policy's base model serves as one."""
    if not objective.needs_ref_logprobs or config.checkpoint.reference_is_base(config.model.lora_rank is not None):
        return None
    save = Path(config.checkpoint.save) / REFERENCE if config.checkpoint.save is not None else None
    if config.checkpoint.ref_load is not None:
        path = required_checkpoint("--ref-load", config.checkpoint.ref_load)
        shape = config.model if has_adapters(path) else without_lora(config.model)
        reference = build_model(shape, device, config.parallel)
        load_weights(path, shape, reference, not config.checkpoint.skip_checkpoint_checks)
        return reference.requires_grad_(False).eval()
    reference = build_model(config.model, device, config.parallel)
    if not resumes:
        reference.load_state_dict(policy.state_dict())
        if save is not None:
            save_weights(save, config, reference)
    elif save is not None and (save / "metadata.json").is_file():
        load_weights(save, config.model, reference, not config.checkpoint.skip_checkpoint_checks)
    else:
        raise InputError("the objective's reference: the continued run saved no reference weights; give --ref-load")
    return reference.requires_grad_(False).eval()


def _reference(
    config: TrainConfig, objective: Objective, model: Model | None, policy: list[torch.nn.Module]
) -> Reference | None:
    """The reference on ``model`` or, if that is None, on the policy's base model."""
    if not objective.needs_ref_logprobs:
        return None
    if model is None:
        return Reference(_engine(config, policy), is_base=True)
    return Reference(_engine(config, model), config.objective.offload_reference)


def _constant_bytes(
    config: TrainConfig, optimizer: TrainingOptimizer, frozen: Sequence[torch.nn.Module], critic: Critic | None
) -> float:
    """Bytes that the states of all models occupy on this rank throughout a step."""
    ranks = current_mesh().data_size if config.parallel.use_distributed_optimizer else 1
    total = constant_bytes(optimizer.chunks, config.optimization, ranks)
    if critic is not None:
        total += constant_bytes(critic.optimizer.chunks, config.optimization, ranks)
    return total + constant_bytes(frozen)


def _frozen_models(
    reference: Model | None, teachers: Teachers | None, config: TrainConfig | None = None
) -> list[torch.nn.Module]:
    """The chunks of models that are not trained; with ``config``, only of those that stay on the device."""
    if config is not None and config.objective.offload_reference:
        return []
    chunks = [] if reference is None else list(reference.model_chunks)
    return chunks + ([] if teachers is None else list(teachers.models))


def _engine(config: TrainConfig, model: Model | list[torch.nn.Module], routing_replay: bool = False) -> TreeEngine:
    engine = TreeEngine(
        model,
        config.sampling.temperature,
        config.tree.logprob_chunk_tokens,
        config.tree.tree_attention_impl,
        routing_replay,
    )
    engine.offload_kv(config.tree.kv_offload_fraction)
    return engine


def _evaluations(config: TrainConfig, engine: TreeEngine, held_out: list[Rollout]) -> list[Evaluation]:
    if not config.logging.eval_interval:
        return []
    return [StoredEvaluation(engine, held_out, config.tree, config.data.global_batch_size or len(held_out))]
