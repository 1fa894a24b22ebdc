"""Saves and loads an engine's state in the folders that verl names, in this project's checkpoint format.

    LOCAL_PATH/iter_0000200/    weights, optimizer, schedule and random states (Megatron's distributed format)
    LOCAL_PATH/weights/         weights alone, if ``checkpoint.save_contents`` has no "optimizer"
    LOCAL_PATH/huggingface/     with "hf_model" in ``checkpoint.save_contents``

verl keeps its own state (data loader, step) beside it.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.save_load import (
    load_checkpoint,
    load_weights,
    save_base,
    save_checkpoint,
    save_weights,
)
from megatron_dta.training.checkpoint.writer import on_rank0
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.huggingface.save import write_hf

logger = logging.getLogger(__name__)
_WEIGHTS, _HUGGINGFACE = "weights", "huggingface"
_CONTENTS = {"model", "optimizer", "extra", "hf_model"}


class VerlCheckpoints:
    """The checkpoints of one engine.

    Raises:
        InputError: verl's settings ask for a form of checkpoint that does not exist here.
    """

    def __init__(self, engine: Any) -> None:  # a MegatronDtaEngine
        self._engine, self._saved = engine, []
        config = engine.checkpoint_config
        for contents in (config.save_contents, config.load_contents):
            if unknown := set(contents) - _CONTENTS:
                raise InputError(f"checkpoint contents {sorted(unknown)}: choose from {', '.join(sorted(_CONTENTS))}")
        for name in ("async_save", "save_lora_only"):
            if config.get(name, False):
                raise InputError(f"checkpoint.{name}=True is not supported by the engine megatron_dta; set it to False")

    def save(self, local_path: str, global_step: int, keep: int | None) -> None:
        """Write a checkpoint and delete the oldest ones beyond ``keep`` (None: keep all). Every rank must call this."""
        engine, folder = self._engine, Path(local_path)
        contents = engine.checkpoint_config.save_contents
        config = self._config(folder)
        on_rank0(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        if "optimizer" in contents and engine.optimizer is not None:
            save_base(config, engine.model)
            save_checkpoint(folder, config, engine.model, engine.optimizer, global_step, {})
        elif "model" in contents:
            on_rank0(folder, lambda: shutil.rmtree(folder / _WEIGHTS, ignore_errors=True))
            save_weights(folder / _WEIGHTS, config, engine.model)
        if "hf_model" in contents:
            if engine.value_head:
                raise InputError("checkpoint.save_contents: a critic cannot be saved as hf_model; leave it out")
            target = folder / _HUGGINGFACE
            on_rank0(folder, lambda: shutil.rmtree(target, ignore_errors=True))
            write_hf(config, engine.model, target, "checkpoint.save_contents hf_model")
        self._saved = [*(path for path in self._saved if path != folder), folder]
        while keep and len(self._saved) > keep:
            oldest = self._saved.pop(0)
            on_rank0(folder, lambda oldest=oldest: shutil.rmtree(oldest, ignore_errors=True))

    def load(self, local_path: str) -> None:
        """Load a checkpoint: everything, or only the weights if ``load_contents`` has no "optimizer"."""
        engine, folder = self._engine, Path(local_path)
        path = find_checkpoint(str(folder))
        if path is None and (folder / _WEIGHTS).is_dir():
            path = folder / _WEIGHTS
        if path is None:
            raise InputError(f"{folder}: holds no checkpoint of the engine megatron_dta")
        if engine.optimizer is None or "optimizer" not in engine.checkpoint_config.load_contents:
            load_weights(path, engine.settings.model, engine.model)
            return
        _, _, changed = load_checkpoint(path, self._config(folder), engine.model, engine.optimizer)
        for line in changed:
            logger.info("changed since the checkpoint: %s", line)

    def _config(self, folder: Path) -> TrainConfig:
        config = self._engine.settings
        return replace(config, checkpoint=replace(config.checkpoint, save=str(folder)))
