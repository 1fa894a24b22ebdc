"""Writes files and folders atomically: under a temporary name in the same folder, then renamed.

It also reads JSON files, so that their errors have the same wording everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder; renames it to ``path`` on success, removes it on failure."""
    path = _file_behind(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # a parent that is a file has raised above; its error is the one to report
            temporary.unlink()


def check_target(target: Path) -> None:
    """Refuse an output folder that exists already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target}: exists already; give a folder that does not, or delete it first")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder with a temporary name; renames it to ``target`` on success, deletes it on failure."""
    check_target(target)
    folder = target.with_name(target.name + ".unfinished")
    # What a killed process left.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield folder
        os.replace(folder, target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_text(path: Path, text: str, mode: int | None = None) -> None:
    """Replace the content of ``path`` atomically and flush it to disk: a kill leaves the old text or the new one.

    Args:
        mode: the permissions of the file; by default those that the process gives to new files.
    """
    path = _file_behind(path)
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "w", encoding="utf-8") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def check_output(path: str) -> None:
    """Refuse an ``--output`` that cannot be written, before the work whose result it is to hold."""
    if not _file_behind(Path(path)).parent.is_dir():
        raise InputError(f"--output {path}: its folder does not exist; make it first")


def _file_behind(path: Path) -> Path:
    """``path`` behind symbolic links, which stay; refuses what a file must not replace, such as a device."""
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not os.path.isfile(target):
        raise InputError(f"{path}: cannot be written: it exists and is no file; give another name")
    return target


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        InputError: the file cannot be read or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not a JSON file") from None
