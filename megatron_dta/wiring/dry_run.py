"""``--dry-run``: checks a training command without training and without writing anything.

    flags and mesh   checked when the command line is parsed
    folders          every output folder exists or can be created, and is writable
    data             rollouts and prompts are read in full, as in training; tokenizer and reward are loaded
    servers          their addresses are valid; those that do not answer are listed, since they may be started later
    plan             the first step's forest for stored rollouts; the longest possible rollout for sampled ones
    checkpoints      every checkpoint that the run would load exists, is complete, and matches the model
    memory           estimate for the pipeline stage that needs most; compared with the GPU's memory if there is a GPU

The first error ends the check with the message that training would have printed. No process group is created, so one
process can check a command for any mesh: WORLD_SIZE=64 python -m megatron_dta.train ... --dry-run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.planning.plan_step import plan_forest
from megatron_dta.core.planning.segments.plan import default_in_flight
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.agents.service import load_agent
from megatron_dta.extras.capacity.memory import InFlight, RankMemory, stage_memory
from megatron_dta.extras.capacity.settings import states_of_run
from megatron_dta.sampling.environment import load_environment
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.training.checkpoint.files import required_checkpoint, starting_point
from megatron_dta.training.checkpoint.integrity import check_parts, refuse_foreign_checkpoint
from megatron_dta.training.checkpoint.reader import read_common
from megatron_dta.training.checkpoint.save_load import check_continues, check_weights
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.derived.lora_sizes import adapter_parameters
from megatron_dta.training.config.distillation import is_address
from megatron_dta.training.data.stored import StoredRollouts
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config
from megatron_dta.training.huggingface.files import SafetensorsFolder
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of
from megatron_dta.training.huggingface.save import carried_text_of, check_save_hf
from megatron_dta.training.huggingface.weights import check_tensors
from megatron_dta.training.monitor.metrics import check_loggers
from megatron_dta.training.monitor.run_description import mesh_text, run_mesh, steps_text, tokenizer_lines
from megatron_dta.training.teachers import teacher_folders, teacher_shape
from megatron_dta.wiring.engines import listed_servers, silent_servers
from megatron_dta.wiring.setup import read_data, with_known_sizes
from megatron_dta.wiring.sources import steps_per_rollout_batch

Report = Callable[[str], None]


def dry_run(config: TrainConfig, report: Report) -> None:
    """Check ``config`` and report what its run would do.

    Raises:
        InputError: the configuration cannot run; the message names the first problem.
    """

    def show(name: str, text: str) -> None:
        report(f"{name:<12} {text}")

    check_loggers(config.logging)
    _check_folders(config)
    check_save_hf(config)
    objective = make_objective(config.objective)
    stored, held_out, task = read_data(config, objective)
    config = with_known_sizes(config, task)
    world_size = os.environ.get("WORLD_SIZE", "1")
    mesh = run_mesh(config, int(world_size) if world_size.isdecimal() else 1)
    shape = DecoderShape.of(config.model)
    dtype = str(config.model.params_dtype).removeprefix("torch.")
    show("model", f"{shape.num_parameters:,} parameters, {dtype}, vocabulary of {config.model.padded_vocab_size():,}")
    if config.model.lora_rank is not None:
        show("adapters", f"{adapter_parameters(config.model):,} parameters, which alone are trained")
    show("mesh", mesh_text(mesh))
    flight = None
    if task is not None:
        for line in task.notes:
            show("left out", line)
        longest = _show_prompts(config, task, show)
        flight = _flight_of(config, [longest], [])
    elif stored is not None:
        show("held out", f"{len(held_out):,} rollouts") if held_out else None
        flight = _show_rollouts(config, stored, show)
    _show_servers(config, show)
    show("steps", steps_text(config))
    for line in _starting_points(config, objective):
        show("start", line)
    for name, teacher in _teacher_shapes(config).items():
        show("teacher", f"{name}: {DecoderShape.of(teacher).num_parameters:,} parameters")
    memory = _memory(config, objective, shape, mesh, flight)
    _show_memory(config, memory, show)
    report("dry run: nothing is wrong; nothing was trained or written")


def _check_folders(config: TrainConfig) -> None:
    """Check that every output folder is writable or can be created."""
    logging = config.logging
    for flag, path in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", logging.tensorboard_dir),
        ("--timeline-dir", logging.timeline_dir),
        ("--rollout-weights-dir", config.sampling.rollout_weights_dir),
        ("--save-hf", config.checkpoint.save_hf and str(Path(config.checkpoint.save_hf).parent)),
    ):
        if path is None:
            continue
        folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise InputError(f"{flag}: the folder {path} cannot be created ({folder} is a file)")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{flag}: the folder {path} cannot be written ({folder}: no permission)")


def _show_prompts(config: TrainConfig, task: SamplingTask, show: Callable[[str, str], None]) -> int:
    """Report the prompts and the tokenizer, and return the largest possible number of tokens in a rollout."""
    sampling = config.sampling
    if config.agent.is_used:
        load_agent(config.agent)
    if config.environment.environment is not None:
        load_environment(config.environment.environment)
    lengths = [len(prompt.token_ids) for prompt in task.prompts]
    if not lengths:
        raise InputError("there are no prompts to train on")
    show(
        "prompts",
        f"{len(lengths):,} of {min(lengths)} to {max(lengths):,} tokens, {len(task.eval_prompts):,} held out; "
        f"a rollout batch has {sampling.rollout_batch_size} x {sampling.n_samples_per_prompt} rollouts",
    )
    show("epochs", _epochs_of_prompts(config, len(lengths)))
    for name, text in tokenizer_lines(task.tokenizer, config.model.vocab_size):
        show(name, text)
    return max(lengths) + sampling.rollout_max_response_len


def _show_servers(config: TrainConfig, show: Callable[[str, str], None]) -> None:
    urls = listed_servers(config)
    if urls:
        silent = silent_servers(config, urls)
        show("servers", f"{len(urls) - len(silent)} of {len(urls)} answer")
        for url, reason in silent.items():
            show("", f"{url} does not: {reason}")


def _epochs_of_prompts(config: TrainConfig, count: int) -> str:
    """How often the run samples each of ``count`` prompts. A rollout batch may span the end of an epoch."""
    sampling = config.sampling
    batch = sampling.rollout_batch_size
    batches = -(-config.optimization.train_iters // steps_per_rollout_batch(config))
    text = f"{batches * batch / count:,.2f} in {batches:,} rollout batches of {batch:,} prompts"
    if config.filtering.dynamic_sampling or sampling.over_sampling_batch_size is not None:
        text = f"at least {text}; rejected groups are replaced by further prompts"
    if batch > count:
        least, most = batch // count, -(-batch // count)
        often = f"{least} times" if least == most else f"{least} to {most} times"
        text += f"; warning: there are only {count:,}, so a rollout batch holds each {often}, as separate groups"
    return text


def _epochs_of_rollouts(config: TrainConfig, stored: StoredRollouts) -> str:
    """How often the run trains each stored rollout, and how full its steps are."""
    sizes, wanted = stored.epoch_sizes(0), config.data.global_batch_size or 1
    text = f"{config.optimization.train_iters / len(sizes):,.2f}; the first has {len(sizes):,} steps"
    if min(sizes) < wanted:
        short = sum(size < wanted for size in sizes)
        text += f", {short:,} of them with fewer than --global-batch-size {wanted:,} rollouts (at least {min(sizes):,})"
    return text


def _show_rollouts(config: TrainConfig, stored: StoredRollouts, show: Callable[[str, str], None]) -> InFlight:
    """Report the stored rollouts and the plan of the first step, and return the tokens in flight."""
    everything = stored.rollouts
    lengths = np.array([len(rollout) for rollout in everything])
    trained = sum(int(np.count_nonzero(rollout.loss_mask)) for rollout in everything)
    show(
        "rollouts",
        f"{len(lengths):,} of {lengths.min()} to {lengths.max():,} tokens, {lengths.sum():,} in all, "
        f"{trained:,} trained",
    )
    show("epochs", _epochs_of_rollouts(config, stored))
    return _flight_of(config, lengths.tolist(), stored.next_batch(0), show)


def _flight_of(
    config: TrainConfig,
    lengths: Sequence[int],
    rollouts: Sequence[Rollout],
    show: Callable[[str, str], None] | None = None,
) -> InFlight:
    """The largest number of tokens in flight: from the plan of ``rollouts``, or from the budget for ``lengths``."""
    tree = config.tree
    segment = tree.tree_segment_tokens or DEFAULT_SEGMENT_TOKENS
    longest = max(lengths)
    budget = tree.tree_memory_tokens or default_in_flight(longest, segment)
    if budget < longest and tree.tree_mode != "packed":
        raise InputError(
            f"--tree-memory-tokens {budget}: a rollout has {longest} tokens, which are all in flight at its end; "
            f"raise it to {longest}"
        )
    tokens = float(budget)
    if rollouts:
        sequences = trained_parts(rollouts)[0]
        plan = plan_forest(sequences, tree.tree_mode, StepBudget(segment, tree.tree_memory_tokens))
        total = sum(map(len, sequences))
        tokens = float(plan.peak_in_flight_tokens)
        if show is not None:
            show(
                "first step",
                f"{len(sequences)} rollouts, {total:,} tokens, {plan.tree.num_tokens:,} unique "
                f"(reuse {total / plan.tree.num_tokens:.2f}), {plan.num_segments} segments of at most "
                f"{plan.segment_tokens}, {plan.peak_in_flight_tokens:,} tokens in flight",
            )
        # Later steps may hold the longest rollout.
        tokens = max(tokens, float(longest))
    return InFlight(tokens, float(segment), float(longest + segment), tree.tree_activation_tokens)


def _starting_points(config: TrainConfig, objective: Objective) -> list[str]:
    """Check the weights that the run would load and describe each in a line."""
    checkpoint, lines = config.checkpoint, []
    start, resumes = starting_point(checkpoint)
    if start is not None:
        if not checkpoint.skip_checkpoint_checks:
            refuse_foreign_checkpoint(start)
        check_parts(start)
        common = read_common(start)
        if resumes:
            changed = check_continues(start, common, config, objective.needs_critic)
            done = "" if common["iteration"] < config.optimization.train_iters else ": nothing is left to train"
            lines.append(f"continues {start} after step {common['iteration']}{done}")
            lines += [f"changed since the checkpoint: {line}" for line in changed if not line.startswith("--dry-run")]
        else:
            check_weights(start, common, config.model)
            lines.append(f"from the weights of {start}")
    elif checkpoint.load_hf is not None:
        _check_hf(Path(checkpoint.load_hf), config)
        lines.append(f"from the weights of {checkpoint.load_hf}")
        carried = carried_text_of(config)
        lines += [f"not trained: {carried}; exports hold them unchanged"] if carried is not None else []
    else:
        lines.append(f"from random weights, seed {config.optimization.seed}")
    for flag, folder, needed in (
        ("--ref-load", checkpoint.ref_load, objective.needs_ref_logprobs),
        ("--critic-load", config.critic.critic_load, objective.needs_critic),
    ):
        if folder is not None and needed:
            path = required_checkpoint(flag, folder)
            check_parts(path)
            check_weights(path, read_common(path), config.model)
            lines.append(f"{flag} {path}")
    return lines


def _check_hf(folder: Path, config: TrainConfig) -> None:
    """Check that all tensors are present and complete and have the shapes that config.json implies."""
    family = architecture(read_hf_config(folder))
    shape = ModelShape.of(config.model)
    reader = SafetensorsFolder(folder)
    check_tensors(reader, parameters_of(family.architecture, shape, reader.prefix), shape)


def _memory(
    config: TrainConfig, objective: Objective, shape: DecoderShape, mesh: RunMesh, flight: InFlight | None
) -> tuple[int, RankMemory, float]:
    """The pipeline stage that needs most memory, its memory, and the bytes of the critic and reference there."""
    model, states = config.model, states_of_run(config)
    flight = flight or InFlight(0.0, 0.0, 0.0)
    adapters = adapter_parameters(model)
    trained = adapters / shape.num_parameters if adapters else 1.0
    is_base = config.checkpoint.reference_is_base(model.lora_rank is not None)
    copies_reference = not is_base and not config.objective.offload_reference
    worst: tuple[int, RankMemory, float] | None = None
    for stage in range(mesh.pipeline):
        total = stage_memory(shape, mesh, states, stage, flight)
        # An approximation: adapters are assumed to be spread over the stages as the weights are.
        gradients, optimizer, host = (part * trained for part in (total.gradients, total.optimizer, total.host))
        of_stage = replace(total, gradients=gradients, optimizer=optimizer, host=host)
        more = 0.0
        if objective.needs_critic:
            more += total.weights + total.gradients + total.optimizer
        if objective.needs_ref_logprobs and copies_reference:
            more += of_stage.weights
        if not config.objective.offload_reference:
            teachers = [DecoderShape.of(teacher) for teacher in _teacher_shapes(config).values()]
            more += sum(
                stage_memory(teacher, mesh, states, stage, InFlight(0.0, 0.0, 0.0)).weights for teacher in teachers
            )
        if worst is None or of_stage.total + more > worst[1].total + worst[2]:
            worst = stage, of_stage, more
    assert worst is not None  # a pipeline has a stage
    return worst


def _teacher_shapes(config: TrainConfig) -> dict[str, ModelConfig]:
    """The shapes by name of the teachers that will be in the run's processes."""
    folders = teacher_folders(config.distillation.teacher_load_hf or [])
    return {name: teacher_shape(config, folder) for name, folder in folders.items() if not is_address(folder)}


def _show_memory(config: TrainConfig, memory: tuple[int, RankMemory, float], show: Callable[[str, str], None]) -> None:
    stage, parts, more = memory
    needed = (parts.total + more) / GIB
    named = {**parts.parts(), "further models": more}
    text = ", ".join(f"{name.replace('_', ' ')} {value / GIB:.2f}" for name, value in named.items() if value)
    show("memory", f"about {needed:.2f} GiB on a rank of stage {stage} (estimate): {text}")
    if parts.host:
        show("", f"{parts.host / GIB:.2f} GiB of the rank's optimizer states, K and V are on the host")
    limit = config.tree.tree_memory_gib
    constant = (parts.weights + parts.gradients + parts.optimizer + more) / GIB
    if limit is not None:
        show("", f"--tree-memory-gib {limit:g}: the planner keeps the step within it")
        if constant > limit:
            raise InputError(
                f"--tree-memory-gib {limit:g}: weights, gradients and optimizer states take {constant:.2f} GiB of it; "
                "raise it, or divide the model over more processes"
            )
    elif torch.cuda.is_available():
        available = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
        show("", f"the GPU has {available:.2f} GiB")
        how = "lower --tree-memory-tokens or --tree-activation-tokens, or take more processes"
        if config.leaves_memory_open:
            # Training recomputes what does not fit.
            needed = constant + parts.keys_values / GIB
            how = "take more processes, or keep optimizer states on the host (--optimizer-cpu-offload)"
        if needed > available:
            raise InputError(
                f"memory: the run needs about {needed:.2f} GiB on a rank of stage {stage}, and the GPU has "
                f"{available:.2f}; {how}"
            )
