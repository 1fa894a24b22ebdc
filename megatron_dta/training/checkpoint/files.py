"""Names of a run's checkpoints on disk: which one counts, which are complete, which are to be pruned.

    SAVE/latest_checkpointed_iteration.txt     number of the checkpoint that counts
    SAVE/iter_0000200/                         a complete checkpoint
    SAVE/*.tmp                                 what is being written or deleted, or was when the run was killed

Nothing gets its proper name before it is complete, and nothing is deleted under its proper name. One process of a job
calls what changes files here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_dta.common.errors import InputError

TRACKER = "latest_checkpointed_iteration.txt"
UNFINISHED = ".tmp"


def iteration_folder(iteration: int) -> str:
    """Name of the checkpoint after so many steps."""
    return f"iter_{iteration:07d}"


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
    path = folder / (text if text == "release" else iteration_folder(int(text)))
    if not (path / "metadata.json").is_file():
        others = ", ".join(sorted(found.name for found in folder.glob("iter_*"))) or "no other checkpoint"
        raise InputError(f"{tracker}: names {path.name}, which is missing or incomplete; there is {others}")
    return path


def unfinished_name(path: Path) -> Path:
    """Where ``path`` is written until it is complete."""
    return path.with_name(path.name + UNFINISHED)


def remove_leftovers(folder: str | Path) -> None:
    """Delete what a killed save left in a run's own folder."""
    for path in Path(folder).glob(f"*{UNFINISHED}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_text(path: Path, text: str) -> None:
    """Let ``path`` hold ``text``; a kill leaves the old text or the new one."""
    unfinished = unfinished_name(path)
    with open(unfinished, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def prune_checkpoints(folder: Path, keep: int, best: int | None = None) -> list[Path]:
    """Delete all but the ``keep`` newest checkpoints, counted back from the one the tracker names, which always stays.

    Later ones than the tracker's are left alone: somebody has set it back on purpose. That of iteration ``best`` stays,
    and counts only while it is among the newest.

    Returns:
        what was deleted.
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
