"""Creates and locks the output folders of a run before anything else is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.training.checkpoint.run_lock import LOCK, RunLock
from megatron_dta.training.checkpoint.writer import refusing_on_all
from megatron_dta.training.config import TrainConfig


@contextmanager
def run_folders(config: TrainConfig) -> Iterator[None]:
    """Create the output folders, so that a wrong path is reported before the first step.

    If the block raises ``InputError``, the new folders are removed again.
    """
    made: list[Path] = []
    try:
        _make_folders(config, made)
        yield
    except InputError:
        for path in reversed(made):
            with suppress(OSError):
                if [file.name for file in path.iterdir()] == [LOCK]:
                    (path / LOCK).unlink()  # It is this command's own lock, since the command created the folder.
                path.rmdir()
        raise


def _make_folders(config: TrainConfig, made: list[Path]) -> None:
    for flag, path in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--timeline-dir", config.logging.timeline_dir),
    ):
        if path is not None:
            try:
                missing = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
                Path(path).mkdir(parents=True, exist_ok=True)
                made += reversed(missing)
            except OSError as error:
                raise InputError(f"{flag}: the folder {path} cannot be created ({error.strerror})") from error
            if not os.access(path, os.W_OK | os.X_OK):
                raise InputError(f"{flag}: the folder {path} cannot be written (no permission, or mounted read-only)")


def lock_run(config: TrainConfig, console: Console) -> RunLock | None:
    """Lock --save on rank 0 before anything is written there; a folder in use raises ``InputError`` on all ranks."""
    lock = None
    with refusing_on_all():
        if config.checkpoint.save is not None and current_mesh().rank == 0:
            lock = RunLock(config.checkpoint.save, lambda line: console.print(line, soft_wrap=True))
    return lock
