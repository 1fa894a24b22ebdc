"""Saves and loads checkpoints in Megatron's distributed format, with the complete state of a run.

    SAVE/latest_checkpointed_iteration.txt     the tracker: the iteration of the current checkpoint
    SAVE/iter_0000200/                         Megatron's torch_dist files: weights, optimizer, schedule, step, random
                                               states, data position, all settings
    SAVE/best_checkpoint.json                  names the best checkpoint, with --keep-best-checkpoint
    SAVE/reference/                            weights of the KL reference model, if the run uses one
    SAVE/base/                                 frozen weights of a run with LoRA adapters, see ``frozen_base``

A checkpoint is written under a temporary name and renamed when it is complete; then the tracker is replaced in the same
way. A kill at any moment therefore leaves either the previous checkpoint or the new one. The next run removes the
leftovers of a killed save. Every rank writes its own shards. A checkpoint loads on any mesh, but the continued run is
bit-identical only on the same mesh. Loading verifies the files against the checksums in the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replace_text
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.config.model import without_lora
from megatron_dta.core.config.options import flag_of
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.training.checkpoint.best import BestCheckpoint
from megatron_dta.training.checkpoint.files import TRACKER, iteration_folder, prune_checkpoints
from megatron_dta.training.checkpoint.frozen_base import (
    ADAPTERS_ONLY,
    BASE,
    adapter_part,
    base_of,
    base_part,
    load_part,
    trained_part,
)
from megatron_dta.training.checkpoint.random_state import capture_random_state, restore_random_state
from megatron_dta.training.checkpoint.reader import check_files, read_checkpoint, read_common, saved_settings
from megatron_dta.training.checkpoint.writer import CheckpointWrite, on_rank0
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.train import settings_by_flag, stored
from megatron_dta.training.optimizer.build import TrainingOptimizer

REFERENCE = "reference"
# Changing any of these changes the mesh.
_MESH_FLAGS = tuple(
    flag_of(setting)
    for setting in fields(ParallelConfig)
    if setting.name.endswith("_parallel_size") or setting.name.startswith(("pipeline_model", "num_virtual"))
)
# Model settings that may differ between a checkpoint and the run that loads it. None changes the meaning of a weight.
_FREE_MODEL_SETTINGS = {
    "max_position_embeddings",
    "init_method_std",
    "bf16",
    "transformer_impl",
    "fused_layer_impl",
    "enable_fp32_lm_head",
    "moe_grouped_gemm",
    "fp8_format",
    "fp8_recipe",
    "recompute_granularity",
}
# Settings that may differ where only the weights are loaded.
_OF_THE_OPTIMIZER = {"params_dtype", "make_vocab_size_divisible_by"}


class SavedPart(Protocol):
    """A component that is saved with the policy and its optimizer, such as the critic."""

    def sharded_state_dict(self, is_loading: bool = False, *, fully_parallel: bool = False) -> dict[str, Any]:
        """The component's part of Megatron's distributed checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the component from its part of a checkpoint."""
        ...


class CheckpointSaver:
    """Saves a run's checkpoints into ``--save``, with ``--async-save`` in the background.

    Every rank creates a saver and calls the same methods at the same steps.

    Args:
        report: called with a line for each checkpoint that becomes the current one.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        optimizer: TrainingOptimizer,
        report: Callable[[str], None] = lambda line: None,
        critic: SavedPart | None = None,
    ) -> None:
        self._config, self._model, self._optimizer, self._report = config, model, optimizer, report
        self._critic = critic
        self._folder = Path(config.checkpoint.save or ".")
        self._pending: tuple[int, CheckpointWrite] | None = None
        self._best: BestCheckpoint | None = None
        self._next_best: BestCheckpoint | None = None

    def set_best(self, best: BestCheckpoint | None) -> None:
        """Name ``best`` as the best checkpoint and never delete it. It must have been published already."""
        if best is not None and best != self._best:
            on_rank0(self._folder, lambda: best.write(self._folder))
        self._best = best

    def save(self, iteration: int, progress: dict[str, Any], best: BestCheckpoint | None = None) -> None:
        """Write the checkpoint of ``iteration``, or start to write it in the background.

        A checkpoint that is still being written is finished first.

        Args:
            best: the best checkpoint once this one is published; it may be this one.
        """
        self.finish()
        state = _complete_state(self._config, self._model, self._optimizer, iteration, progress, self._critic)
        background = self._config.checkpoint.async_save
        parallel = bool(self._config.checkpoint.ckpt_fully_parallel_save)
        path = self._folder / iteration_folder(iteration)
        self._pending = iteration, CheckpointWrite(path, state, background, parallel)
        self._next_best = best
        if not background:
            self.finish()

    def poll(self) -> None:
        """Publish the checkpoint in progress if all ranks have written their shards. Call this between steps."""
        if self._pending is not None and all(current_mesh().gather_from_all(self._pending[1].done)):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in progress, if any, publish it and delete old checkpoints."""
        if self._pending is None:
            return
        (iteration, write), self._pending = self._pending, None
        _make_current(write, iteration)
        self._report(f"saved {write.path}")
        self.set_best(self._next_best)
        if self._config.checkpoint.keep_checkpoints is not None:
            keep, best = self._config.checkpoint.keep_checkpoints, self._best
            number = None if best is None else best.iteration
            on_rank0(write.path, lambda: prune_checkpoints(self._folder, keep, number))


def save_checkpoint(
    folder: str | Path,
    config: TrainConfig,
    model: Model,
    optimizer: TrainingOptimizer,
    iteration: int,
    progress: dict[str, Any],
) -> Path:
    """Write the checkpoint of ``iteration`` into ``folder`` and make it the current one.

    Args:
        progress: the loop's progress as plain values and tensors, identical on every rank.
    """
    state = _complete_state(config, model, optimizer, iteration, progress)
    parallel = bool(config.checkpoint.ckpt_fully_parallel_save)
    write = CheckpointWrite(Path(folder) / iteration_folder(iteration), state, fully_parallel=parallel)
    _make_current(write, iteration)
    return write.path


def _make_current(write: CheckpointWrite, iteration: int) -> None:
    write.finish()
    on_rank0(write.path, lambda: replace_text(write.path.parent / TRACKER, str(iteration)))


def _complete_state(
    config: TrainConfig,
    model: Model,
    optimizer: TrainingOptimizer,
    iteration: int,
    progress: dict[str, Any],
    critic: SavedPart | None = None,
) -> dict[str, Any]:
    """The whole content of a checkpoint: this rank's shards and the state that is common to all ranks."""
    model_state = trained_part(model.sharded_state_dict(), config.model)
    parallel = bool(config.checkpoint.ckpt_fully_parallel_save)
    description = {"settings": json.dumps(settings_by_flag(config)), "progress": progress}
    if config.model.lora_rank is not None:
        description[ADAPTERS_ONLY] = True
    return {
        "model": model_state,
        **optimizer.sharded_state_dict(model_state, fully_parallel=parallel),
        **({} if critic is None else {"critic": critic.sharded_state_dict(fully_parallel=parallel)}),
        "iteration": iteration,
        "rng_state": current_mesh().gather_from_all(capture_random_state()),
        "megatron_dta": description,
    }


def load_checkpoint(
    path: Path, config: TrainConfig, model: Model, optimizer: TrainingOptimizer, critic: SavedPart | None = None
) -> tuple[int, dict[str, Any], list[str]]:
    """Restore weights, optimizer, schedule and random states from a checkpoint.

    Returns:
        the iteration, the loop's progress, and a line for every setting that differs from the checkpoint's.

    Raises:
        InputError: the checkpoint is of another model, was not written by this project, or cannot be read.
    """
    check = not config.checkpoint.skip_checkpoint_checks
    check_files(path, check)
    common = read_common(path)
    changed = check_continues(path, common, config, critic is not None)
    model_state = trained_part(model.sharded_state_dict(), config.model)
    wanted = {"model": model_state}
    if "optimizer" in common:
        wanted |= optimizer.sharded_state_dict(model_state, is_loading=True)
    if critic is not None:
        wanted["critic"] = critic.sharded_state_dict(is_loading="optimizer" in common["critic"])
    if config.model.lora_rank is not None:
        _load_base(base_of(path), model, check)
    state = read_checkpoint(path, wanted)
    load_part(model, state["model"])
    optimizer.load_state_dict(state)
    if critic is not None:
        critic.load_state_dict(state["critic"])
    mesh, random_states = current_mesh(), state["rng_state"]
    if len(random_states) == mesh.world_size and not any(line.startswith(_MESH_FLAGS) for line in changed):
        restore_random_state(random_states[mesh.rank])
    else:
        before = _mesh_text(json.loads(state["megatron_dta"]["settings"]), len(random_states))
        now = _mesh_text(settings_by_flag(config), mesh.world_size)
        changed.append(
            f"mesh: saved with {before}, continued with {now}; random states start from the seed, and results agree "
            "with an unbroken run's up to rounding only"
        )
    return int(state["iteration"]), state["megatron_dta"]["progress"], changed


def _mesh_text(settings: dict[str, Any], processes: int) -> str:
    """The parallel sizes of a mesh of ``processes`` as text; less common sizes are listed only if they are above 1."""

    def size(flag: str) -> int:
        return settings.get(flag) or 1

    tensor, pipeline = size("--tensor-model-parallel-size"), size("--pipeline-model-parallel-size")
    context = size("--context-parallel-size")
    parts = [f"TP {tensor} PP {pipeline} DP {processes // (tensor * context * pipeline)}"]
    for name, flag in (
        ("CP", "--context-parallel-size"),
        ("VPP", "--num-virtual-stages-per-pipeline-rank"),
        ("EP", "--expert-model-parallel-size"),
        ("ETP", "--expert-tensor-parallel-size"),
    ):
        if size(flag) > 1:
            parts.append(f"{name} {size(flag)}")
    layout = settings.get("--pipeline-model-parallel-layout")
    return " ".join(parts + ([f"layout {layout}"] if layout else []))


def check_continues(path: Path, common: dict[str, Any], config: TrainConfig, has_critic: bool) -> list[str]:
    """Check that the run can continue from a checkpoint.

    Args:
        common: the checkpoint's common state, from ``read_common``.

    Returns:
        a line for every setting that differs from the checkpoint's.

    Raises:
        InputError: the run cannot continue from it.
    """
    saved = saved_settings(path, common)
    if saved is None or "progress" not in common["megatron_dta"]:
        raise InputError(f"{path}: has no state to continue from; add --finetune to start from its weights")
    _check_same_model(path, saved, config.model, with_optimizer=True)
    _check_same_optimizer(path, saved, config)
    if has_critic and "critic" not in common:
        raise InputError(f"{path}: has no critic to continue with; add --finetune to start from its weights")
    return [
        f"{flag}: {saved[flag]} before, {value} now"
        for flag, value in settings_by_flag(config).items()
        if flag in saved and saved[flag] != value
    ]


def load_weights(path: Path, model_config: ModelConfig, model: Model, check: bool = True) -> None:
    """Load only the weights and convert them to the model's dtype. Checkpoints of Megatron-LM are accepted.

    A model with adapters keeps its adapters if the checkpoint has none.

    Args:
        check: verify the checkpoint's files first.
    """
    check_files(path, check)
    common = read_common(path)
    check_weights(path, common, model_config)
    if model_config.lora_rank is not None and not _has_adapters(path, common):
        _load_base(path, model, False)
    elif common.get("megatron_dta", {}).get(ADAPTERS_ONLY):
        _load_base(base_of(path), model, check)
        load_part(model, read_checkpoint(path, {"model": adapter_part(model.sharded_state_dict())})["model"])
    else:
        model.load_state_dict(read_checkpoint(path, {"model": model.sharded_state_dict()})["model"])


def check_weights(path: Path, common: dict[str, Any], model_config: ModelConfig) -> None:
    """Refuse weights of another model, if the checkpoint records its model."""
    saved = saved_settings(path, common)
    if saved is None:
        return
    if _has_adapters(path, common) and model_config.lora_rank is None:
        raise InputError(
            f"{path}: has LoRA adapters; give --lora-rank {saved['--lora-rank']}, or merge them with "
            "megatron-dta convert-megatron-to-hf"
        )
    _check_same_model(path, saved, model_config, with_optimizer=False, with_adapters=_has_adapters(path, common))
    if common["megatron_dta"].get(ADAPTERS_ONLY):
        base_of(path)


def _load_base(path: Path, model: Model, check: bool) -> None:
    check_files(path, check)
    load_part(model, read_checkpoint(path, {"model": base_part(model.sharded_state_dict())})["model"])


def has_adapters(path: Path) -> bool:
    """Whether a checkpoint's model has LoRA adapters."""
    return _has_adapters(path, read_common(path))


def _has_adapters(path: Path, common: dict[str, Any]) -> bool:
    return (saved_settings(path, common) or {}).get("--lora-rank") is not None


def save_weights(path: Path, config: TrainConfig, model: Model) -> None:
    """Write a checkpoint ``path`` that holds only the weights."""
    settings = {"settings": json.dumps(settings_by_flag(config))}
    state = {"model": model.sharded_state_dict(), "megatron_dta": settings}
    CheckpointWrite(path, state, fully_parallel=bool(config.checkpoint.ckpt_fully_parallel_save)).finish()


def save_base(config: TrainConfig, model: Model) -> None:
    """Write the frozen weights of a LoRA run into ``SAVE/base``, as a checkpoint of a model without adapters."""
    if config.model.lora_rank is None or config.checkpoint.save is None:
        return
    settings = {"settings": json.dumps(settings_by_flag(replace(config, model=without_lora(config.model))))}
    state = {"model": base_part(model.sharded_state_dict()), "megatron_dta": settings}
    parallel = bool(config.checkpoint.ckpt_fully_parallel_save)
    CheckpointWrite(Path(config.checkpoint.save) / BASE, state, fully_parallel=parallel).finish()


def _check_same_model(
    path: Path, saved: dict[str, Any], model: ModelConfig, with_optimizer: bool, with_adapters: bool = True
) -> None:
    saved = {"--lora-rank": None} | saved
    for setting in fields(model):
        if setting.name in _FREE_MODEL_SETTINGS or (setting.name in _OF_THE_OPTIMIZER and not with_optimizer):
            continue
        if setting.name.startswith("lora_") and not with_adapters:
            continue
        flag, value = flag_of(setting), stored(getattr(model, setting.name))
        if flag in saved and saved[flag] != value:
            name = "the dtype (--bf16)" if setting.name == "params_dtype" else flag
            raise InputError(f"{path}: checkpoint of another model: {name} is {saved[flag]} there and {value} here")


def _check_same_optimizer(path: Path, saved: dict[str, Any], config: TrainConfig) -> None:
    """Refuse a change of --use-distributed-optimizer, which changes the layout of the optimizer's state."""
    before = saved.get("--use-distributed-optimizer", False)
    if before != config.parallel.use_distributed_optimizer:
        change = "add" if before else "leave out"
        raise InputError(
            f"{path}: was written {'with' if before else 'without'} --use-distributed-optimizer; {change} it, or give "
            "--load and --finetune to start from its weights alone"
        )
