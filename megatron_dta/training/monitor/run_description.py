"""Describes a run in a few lines before its first step. ``--dry-run`` prints some of them without building a model.

Each line is a name and a text, at most ``console.WIDTH`` characters long unless it contains paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dta.core.config.derived.pipeline_layout import stage_layers
from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.core.planning.costs.gpus import gpu_named
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.sampling.prompts.tokenizer import GUESSED, Tokenizer
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.save import carried_text_of
from megatron_dta.training.monitor.console import LEGEND

Line = tuple[str, str]


@dataclass(frozen=True)
class BuiltRun:
    """The components of a run that its description needs.

    Attributes:
        parameters, trained: numbers of all parameters and of trained parameters in the whole model.
        constant_bytes: bytes of weights, gradients and optimizer states of all models on this rank.
        task: the sampling task; None if ``rollouts`` are stored ones.
        tokenizer: None if stored rollouts need none.
        metrics: the metrics file, or None.
        decided_memory: the limit of a step's memory and the reasons for it, if no flag decides it.
    """

    config: TrainConfig
    mesh: Mesh
    device: torch.device
    parameters: int
    trained: int
    constant_bytes: float
    task: SamplingTask | None
    tokenizer: Tokenizer | None
    rollouts: Sequence[Rollout]
    metrics: Path | None
    decided_memory: str | None = None


def describe_run(run: BuiltRun) -> Iterator[Line]:
    config = run.config
    yield "model", _model_text(run)
    carried = carried_text_of(config)
    if carried is not None:
        yield "not trained", f"{carried}; exports hold them unchanged"
    yield "devices", _devices_text(run)
    yield "mesh", mesh_text(run_mesh(config, run.mesh.world_size))
    yield "steps", steps_text(config)
    yield "trees", _trees_text(run)
    if run.task is not None:
        sampling = config.sampling
        yield "prompts", f"{len(run.task.prompts):,}, and {len(run.task.eval_prompts):,} held out"
        yield (
            "rollouts",
            f"{sampling.rollout_batch_size} prompts x {sampling.n_samples_per_prompt} at a time, responses of at most "
            f"{sampling.rollout_max_response_len:,} tokens, temperature {sampling.temperature:g}; "
            f"{sampling.rollout_engine}",
        )
    else:
        longest = max(len(rollout) for rollout in run.rollouts)
        yield "rollouts", f"{len(run.rollouts):,} stored ones of at most {longest:,} tokens"
    if run.tokenizer is not None:
        yield from tokenizer_lines(run.tokenizer, config.model.vocab_size)
    yield "memory", _memory_text(run)
    yield "output", _output_text(run)
    yield "figures", LEGEND


def run_mesh(config: TrainConfig, world_size: int) -> RunMesh:
    """The mesh of ``world_size`` processes. The flag checks have already ensured that it is valid."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return RunMesh(
        tensor=tensor,
        pipeline=pipeline,
        data=world_size // (tensor * parallel.context_parallel_size * pipeline),
        layers=tuple(stage_layers(config.model, parallel)),
        chunks=parallel.num_virtual_stages_per_pipeline_rank,
        experts=parallel.expert_model_parallel_size,
        expert_tensor=parallel.expert_tensor_size if config.model.num_experts else 1,
        sequence_parallel=parallel.sequence_parallel,
        context=parallel.context_parallel_size,
    )


def mesh_text(mesh: RunMesh) -> str:
    """The sizes of the mesh and the layers per stage, as text."""
    parts = [f"tensor {mesh.tensor}", f"pipeline {mesh.pipeline}"]
    if mesh.context > 1:
        parts.append(f"context {mesh.context}")
    if mesh.chunks > 1:
        parts.append(f"{mesh.chunks} virtual stages a rank")
    if mesh.experts > 1:
        parts.append(f"experts {mesh.experts}")
    processes = "1 process" if mesh.world_size == 1 else f"{mesh.world_size} processes"
    return f"{processes}: {', '.join(parts)}, data {mesh.data}; layers of stages {list(mesh.layers)}"


def steps_text(config: TrainConfig) -> str:
    """The number of steps and the intervals of checkpoints and evaluations, as text."""
    optimization, parts = config.optimization, []
    parts.append(f"{optimization.train_iters:,} of {config.objective.objective}, learning rate {optimization.lr:g}")
    interval = config.checkpoint.save_interval
    if config.checkpoint.save is None:
        parts.append("nothing is saved (no --save)")
    else:
        parts.append(f"checkpoints every {interval} steps" if interval else "one checkpoint, at the end")
    if config.logging.eval_interval:
        parts.append(f"evaluation every {config.logging.eval_interval} steps")
    return "; ".join(parts)


def tokenizer_lines(tokenizer: Tokenizer, vocab_size: int | None) -> Iterator[Line]:
    """The tokenizer and the tokens that end a response, each with what declares it; and what it lacks of a model's
    vocabulary. If the end was guessed, a line names --eos-id."""
    ends = []
    for token, origin in tokenizer.ends.items():
        text = tokenizer.special_text(token) or tokenizer.decode([token])
        ends.append(f"{token} {text!r} ({origin})" if text else f"{token} ({origin})")
    yield "tokenizer", f"{type(tokenizer).__name__}, {tokenizer.vocab_size:,} tokens; responses end with {ends[0]}"
    for end in ends[1:]:
        yield "", f"or with {end}"
    if tokenizer.ends[tokenizer.eos_id] == GUESSED:
        yield "", "no tokenizer_config.json names it: give --eos-id if another token ends a response"
    unknown = (vocab_size or 0) - tokenizer.vocab_size
    if unknown > 0:
        yield "", f"the model's last {unknown:,} ids have no text in it and are never sampled"


def _model_text(run: BuiltRun) -> str:
    model = run.config.model
    dtype = str(model.params_dtype).removeprefix("torch.")
    trained = f", {run.trained:,} trained" if run.trained < run.parameters else ""
    return (
        f"{run.parameters:,} parameters{trained}, {dtype}; {model.num_layers} layers of {model.hidden_size:,}, "
        f"vocabulary of {model.padded_vocab_size():,}"
    )


def _devices_text(run: BuiltRun) -> str:
    count = run.mesh.world_size
    processes = "1 process" if count == 1 else f"{count} processes"
    if run.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(run.device)
        return f"{count} x {gpu.name}, {gpu.total_memory / GIB:.1f} GiB each"
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    return f"CPU: {processes}, threads each {threads}, cores on this machine {cores}; no CUDA GPU is used"


def _trees_text(run: BuiltRun) -> str:
    tree = run.config.tree
    if tree.tree_mode == "dense":
        return "none (--tree-mode dense): every rollout is computed by itself"
    costs, in_seconds = "costs by counting", False
    if run.device.type == "cuda" and (run.config.model.num_experts is None or run.decided_memory is not None):
        gpu, is_known = gpu_named(torch.cuda.get_device_name(run.device))
        later = "" if run.config.optimization.deterministic_mode else ", corrected by step 2"
        costs = f"costs of the data sheet of an {gpu.name}{'' if is_known else ' (this GPU is not known)'}{later}"
        in_seconds = True
    is_free = in_seconds or tree.tree_memory_gib is not None or run.decided_memory is not None
    size = f"at most {tree.tree_segment_tokens or DEFAULT_SEGMENT_TOKENS:,} tokens"
    if tree.tree_segment_tokens is None and tree.tree_mode != "packed" and is_free:
        size = "the size that is fastest"
    return f"--tree-mode {tree.tree_mode}, segments of {size}, {costs}"


def _memory_text(run: BuiltRun) -> str:
    where = "GPU" if run.device.type == "cuda" else "process"
    size, unit = (run.constant_bytes / GIB, "GiB") if run.constant_bytes >= GIB else (run.constant_bytes / 2**20, "MiB")
    text = f"{size:.1f} {unit} of weights, gradients and optimizer states on the first {where}"
    if run.decided_memory is not None:
        return f"{text}; {run.decided_memory}"
    limit = run.config.tree.tree_memory_gib
    return text + (f"; at most {limit:g} GiB with a step (--tree-memory-gib)" if limit is not None else "")


def _output_text(run: BuiltRun) -> str:
    config = run.config
    logging, save = config.logging, config.checkpoint.save
    inside = [Path(save) / "rollouts"] if save and logging.save_rollouts_interval else []
    inside += [Path(path) for path in (run.metrics, logging.timeline_dir, logging.tensorboard_dir) if path]
    named = [] if save is None else [f"{save}: checkpoints"]
    named += [str(p.relative_to(save)) if save and p.is_relative_to(save) else str(p) for p in inside]
    named += [f"Weights & Biases {logging.wandb_project}"] if logging.wandb_project else []
    named += [f"Hugging Face {config.checkpoint.save_hf}"] if config.checkpoint.save_hf else []
    return ", ".join(named) if named else "none: give --save to keep checkpoints and metrics"


def parameter_counts(model_chunks: Sequence[torch.nn.Module], mesh: Mesh, config: TrainConfig) -> tuple[int, int]:
    """Numbers of all parameters and of trained parameters in the whole model. All ranks of a replica must call this."""
    counts = [0, 0]
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            is_copy = getattr(parameter, "shared", False)
            is_split = getattr(parameter, "tensor_model_parallel", False)
            if is_copy or (mesh.tensor_rank > 0 and not is_split):
                continue
            counts[0] += parameter.numel()
            counts[1] += parameter.numel() * parameter.requires_grad
    total, trained = map(sum, zip(*mesh.gather_over_replica(counts), strict=True))
    if config.model.num_experts is not None and mesh.world_size > 1:
        # Expert parallelism does not follow replicas, so experts are counted over the whole model.
        whole = DecoderShape.of(config.model).num_parameters
        return whole, whole if total == trained else trained
    return total, trained
