"""Detects that a training command has nothing left to do: its last step is saved and, with ``--save-hf``, exported.

``SAVE/save_hf.json`` records the folder that ``--save-hf`` wrote, the step, and the files. It is written before the
folder gets its final name, so the same command can distinguish its own export from any other folder.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import check_target, replace_text
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.config import TrainConfig

EXPORT = "save_hf.json"


def finished(config: TrainConfig) -> list[str] | None:
    """The lines to print if the command is finished; None if work is left."""
    iteration, wanted = saved_iteration(config), config.optimization.train_iters
    if iteration is None or iteration < wanted:
        return None
    lines = [f"{config.checkpoint.save}: {already_at(iteration, wanted)}"]
    if config.checkpoint.save_hf is not None:
        if _exported_iteration(config) != iteration:
            return None
        lines.append(f"{config.checkpoint.save_hf}: holds the model after step {iteration}")
    return lines


def already_at(iteration: int, train_iters: int) -> str:
    """The message that no step is left to train."""
    beyond = "" if iteration == train_iters else f", after step {iteration}"
    return f"already at --train-iters {train_iters}{beyond}; nothing is left to train"


def saved_iteration(config: TrainConfig) -> int | None:
    """Iteration of the current checkpoint in ``--save``; None if there is none."""
    checkpoint = find_checkpoint(config.checkpoint.save) if config.checkpoint.save is not None else None
    number = "" if checkpoint is None else checkpoint.name.removeprefix("iter_")
    return int(number) if number.isdecimal() else None


def check_export(config: TrainConfig) -> None:
    """Check before the run that ``--save-hf`` can be written at its end.

    Raises:
        InputError: the folder exists.
    """
    if config.checkpoint.save_hf is None or finished(config) is not None:
        return
    iteration = _exported_iteration(config)
    if iteration is not None:
        raise InputError(
            f"--save-hf {config.checkpoint.save_hf}: holds what this run exported after step {iteration}; give another "
            "folder, or delete it first"
        )
    check_target(Path(config.checkpoint.save_hf))


def note_export(config: TrainConfig, iteration: int, folder: Path) -> None:
    """Record in ``--save`` that ``folder`` is about to be renamed to ``--save-hf``."""
    if config.checkpoint.save is None or config.checkpoint.save_hf is None:
        return
    target = str(Path(config.checkpoint.save_hf).resolve())
    note = {"folder": target, "iteration": iteration, "files": _files(folder)}
    replace_text(Path(config.checkpoint.save) / EXPORT, json.dumps(note, indent=1) + "\n")


def _exported_iteration(config: TrainConfig) -> int | None:
    """The step after which this run wrote ``--save-hf``; None if it did not or the files have changed since."""
    note = Path(config.checkpoint.save or "") / EXPORT
    target = Path(config.checkpoint.save_hf or "").resolve()
    if config.checkpoint.save is None or not note.is_file():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record = json.loads(note.read_text(encoding="utf-8"))
        # Further files in the folder are ignored.
        if record["folder"] == str(target) and record["files"] and _is_part(record["files"], _files(target)):
            return int(record["iteration"])
    return None


def _is_part(part: dict[str, list[int]], whole: dict[str, list[int]]) -> bool:
    return all(whole.get(name) == stamp for name, stamp in part.items())


def _files(folder: Path) -> dict[str, list[int]]:
    """Size and modification time of every file in a folder, by relative name."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
