"""Finds, names and prunes the checkpoints in a run's folder.

    SAVE/latest_checkpointed_iteration.txt     the tracker: the iteration of the current checkpoint
    SAVE/iter_0000200/                         a complete checkpoint
    SAVE/*.tmp                                 files that are being written or deleted, or leftovers of a killed run

A file or folder gets its final name only when it is complete, and is renamed before it is deleted. Only one process of
a job may call the functions that change files.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.config import CheckpointConfig

TRACKER = "latest_checkpointed_iteration.txt"
UNFINISHED = ".tmp"


def iteration_folder(iteration: int) -> str:
    """Name of the checkpoint folder after ``iteration`` steps."""
    return f"iter_{iteration:07d}"


def find_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint that ``folder``'s tracker names, or ``folder`` itself if it is one; None if there is none.

    Raises:
        InputError: the tracker is damaged, or the checkpoint that it names is missing or incomplete.
    """
    folder = Path(folder)
    if (folder / "metadata.json").is_file():
        return folder
    tracker = folder / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise InputError(
            f"{tracker}: holds {text[:40]!r} instead of the number of a checkpoint; correct it or remove it"
        )
    path = folder / (text if text == "release" else iteration_folder(int(text)))
    if not (path / "metadata.json").is_file():
        others = ", ".join(sorted(metadata.parent.name for metadata in folder.glob("iter_*/metadata.json")))
        remedy = f"write the number of another one into it: {others}" if others else "there is no other one"
        raise InputError(f"{tracker}: names {path.name}, which is missing or incomplete; {remedy}")
    return path


def required_checkpoint(flag: str, folder: str | Path) -> Path:
    """``find_checkpoint``, but raises ``InputError`` with ``flag`` if there is none."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        raise InputError(f"{flag} {folder}: holds no checkpoint")
    return checkpoint


def starting_point(settings: CheckpointConfig) -> tuple[Path | None, bool]:
    """The checkpoint to start from, or None, and whether the run continues the checkpoint's run.

    Raises:
        InputError: ``--load`` holds no checkpoint.
    """
    save, load = settings.save, settings.load
    saved = find_checkpoint(save) if save is not None else None
    if saved is not None:
        # After a kill, the same command must continue from --save even if it names another --load.
        return saved, True
    loaded = find_checkpoint(load) if load is not None else None
    if loaded is not None:
        return loaded, not settings.finetune
    same_folder = load is not None and save is not None and Path(load).resolve() == Path(save).resolve()
    if load is not None and not same_folder:
        raise InputError(f"--load {load}: holds no checkpoint")
    return None, False


def unfinished_name(path: Path) -> Path:
    """The temporary path under which ``path`` is written."""
    return path.with_name(path.name + UNFINISHED)


def remove_leftovers(folder: str | Path) -> None:
    """Delete the temporary files that a killed save left in a run's own folder."""
    for path in Path(folder).glob(f"*{UNFINISHED}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def prune_checkpoints(folder: Path, keep: int, best: int | None = None) -> list[Path]:
    """Delete all but the ``keep`` newest checkpoints, counted back from the one that the tracker names.

    The tracker's checkpoint and that of iteration ``best`` are always kept. ``best`` counts towards ``keep`` only while
    it is among the newest. Checkpoints later than the tracker's are kept, since a user has set the tracker back.

    Returns:
        the deleted paths.
    """
    counting = find_checkpoint(folder)
    if counting is None or keep < 1:
        return []
    numbered = [(path.name.removeprefix("iter_"), path) for path in folder.glob("iter_*") if path.is_dir()]
    complete = sorted((int(number), path) for number, path in numbered if number.isdecimal())
    old = [path for _, path in complete if path.name <= counting.name]
    kept = {counting.name} if best is None else {counting.name, iteration_folder(best)}
    doomed = [path for path in old[:-keep] if path.name not in kept]
    for path in doomed:
        unfinished = unfinished_name(path)
        shutil.rmtree(unfinished, ignore_errors=True)
        os.replace(path, unfinished)
        shutil.rmtree(unfinished)
    return doomed
