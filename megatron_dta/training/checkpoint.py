"""Checkpoints in Megatron's distributed format: everything a run needs to go on as if it had never stopped.

    SAVE/latest_checkpointed_iteration.txt     number of the checkpoint that counts
    SAVE/iter_0000200/                         Megatron's torch_dist files: weights, optimizer, schedule, step, random
                                               states, data position, all settings
    SAVE/reference/                            weights of the KL reference model, where one is used

A checkpoint is written under another name and renamed when complete, then the number file is replaced the same way.
So a kill at any moment leaves the previous checkpoint or the new one, never half of one. What a killed save left behind
is removed by the next run. Megatron and PyTorch pickle a checkpoint's metadata: load only what you trust.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dta import cpu_compat
from megatron_dta.config import ModelConfig, TrainConfig
from megatron_dta.config.options import flag_of
from megatron_dta.config.train import settings_of
from megatron_dta.errors import InputError
from megatron_dta.training.optimizer import TrainingOptimizer
from megatron_dta.training.random_state import capture_random_state, restore_random_state

TRACKER = "latest_checkpointed_iteration.txt"
REFERENCE = "reference"
_UNFINISHED = ".tmp"
# Whatever a damaged file makes Megatron's and PyTorch's readers raise; the latter's own is no ``Exception``.
_READ_ERRORS = (Exception, CheckpointException)
# Settings of the model that may differ between a checkpoint and the run that loads it: they change no weight's meaning.
_FREE_MODEL_SETTINGS = {
    "max_position_embeddings",
    "init_method_std",
    "attention_dropout",
    "hidden_dropout",
    "group_query_attention",
    "bf16",
    "fp16",
    "transformer_impl",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
}


def find_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, or ``folder`` itself if it is one; None where there is none."""
    folder = Path(folder)
    if (folder / "metadata.json").is_file():
        return folder
    tracker = folder / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise InputError(
            f"{tracker}: holds {text[:40]!r} instead of the number of a checkpoint; correct it or remove it"
        )
    path = folder / (text if text == "release" else _iteration_folder(int(text)))
    if not (path / "metadata.json").is_file():
        others = ", ".join(sorted(found.name for found in folder.glob("iter_*"))) or "no other checkpoint"
        raise InputError(f"{tracker}: names {path.name}, which is missing or incomplete; there is {others}")
    return path


def remove_leftovers(folder: str | Path) -> None:
    """Delete what a killed save left in a run's own folder."""
    for path in Path(folder).glob(f"*{_UNFINISHED}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_checkpoint(
    folder: str | Path,
    config: TrainConfig,
    model: MegatronModule,
    optimizer: TrainingOptimizer,
    iteration: int,
    progress: dict[str, Any],
) -> Path:
    """Write the checkpoint of ``iteration`` and make it the one that counts.

    Args:
        progress: where the loop stands, made of numbers, strings, lists and tensors.
    """
    model_state = model.sharded_state_dict()
    state = {
        "model": model_state,
        **optimizer.sharded_state_dict(model_state),
        "iteration": iteration,
        "rng_state": [capture_random_state()],
        "megatron_dta": {"settings": json.dumps(settings_by_flag(config)), "progress": progress},
    }
    path = _write(Path(folder) / _iteration_folder(iteration), state)
    _replace_text(Path(folder) / TRACKER, str(iteration))
    return path


def load_checkpoint(
    path: Path, config: TrainConfig, model: MegatronModule, optimizer: TrainingOptimizer
) -> tuple[int, dict[str, Any], list[str]]:
    """Continue a run: weights, optimizer, schedule and random states are set to the checkpoint's.

    Returns:
        the iteration, the loop's progress, and a line for every setting that differs from the checkpoint's.

    Raises:
        InputError: the checkpoint is of another model, was not written by this project, or cannot be read.
    """
    common = _read_common(path)
    if "megatron_dta" not in common:
        raise InputError(f"{path}: has no state to continue from; add --finetune to start from its weights")
    saved = json.loads(common["megatron_dta"]["settings"])
    _check_same_model(path, saved, config.model, with_dtype=True)
    model_state = model.sharded_state_dict()
    wanted = {"model": model_state}
    if "optimizer" in common:
        wanted |= optimizer.sharded_state_dict(model_state, is_loading=True)
    state = _read(path, wanted)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state)
    restore_random_state(state["rng_state"][0])
    changed = [
        f"{flag}: {saved.get(flag)} before, {value} now"
        for flag, value in settings_by_flag(config).items()
        if saved.get(flag) != value
    ]
    return int(state["iteration"]), state["megatron_dta"]["progress"], changed


def load_weights(path: Path, model_config: ModelConfig, model: MegatronModule) -> None:
    """Take only the weights; they are converted to the model's dtype. Checkpoints of Megatron-LM will do."""
    common = _read_common(path)
    if "megatron_dta" in common:
        _check_same_model(path, json.loads(common["megatron_dta"]["settings"]), model_config, with_dtype=False)
    model.load_state_dict(_read(path, {"model": model.sharded_state_dict()})["model"])


def save_weights(path: Path, config: TrainConfig, model: MegatronModule) -> None:
    """Write only the weights as the checkpoint ``path``."""
    settings = {"settings": json.dumps(settings_by_flag(config))}
    _write(path, {"model": model.sharded_state_dict(), "megatron_dta": settings})


def _iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def settings_by_flag(config: TrainConfig) -> dict[str, Any]:
    """Every setting by its flag, as plain values."""
    plain = (type(None), bool, int, float, str, list)
    return {
        flag_of(setting): value if isinstance(value, plain) else str(value) for _, setting, value in settings_of(config)
    }


def _check_same_model(path: Path, saved: dict[str, Any], model: ModelConfig, with_dtype: bool) -> None:
    for setting in fields(model):
        if setting.name in _FREE_MODEL_SETTINGS or (setting.name == "params_dtype" and not with_dtype):
            continue
        flag, value = flag_of(setting), getattr(model, setting.name)
        value = str(value) if isinstance(value, torch.dtype) else value
        if flag in saved and saved[flag] != value:
            name = "the dtype (--bf16)" if setting.name == "params_dtype" else flag
            raise InputError(f"{path}: checkpoint of another model: {name} is {saved[flag]} there and {value} here")


def _write(path: Path, state: dict[str, Any]) -> Path:
    cpu_compat.write_checkpoints_in_process()
    unfinished = path.with_name(path.name + _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        dist_checkpointing.save(state, str(unfinished))
    except (OSError, CheckpointException) as error:
        raise InputError(f"{path}: the checkpoint cannot be written ({_reason(error)})") from error
    # A checkpoint of this name that no tracker names: its run was killed before it counted.
    shutil.rmtree(path, ignore_errors=True)
    os.replace(unfinished, path)
    return path


def _replace_text(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + _UNFINISHED)
    with open(unfinished, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _read_common(path: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load_common_state_dict(str(path))
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _read(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(wanted, str(path))
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> InputError:
    return InputError(
        f"{path}: the checkpoint cannot be read ({_reason(error)}); write the number of an earlier one to {TRACKER}"
    )


def _reason(error: BaseException) -> str:
    """One line; of an error of several ranks, whose own message is a traceback, what one of them met."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:200] or type(error).__name__
