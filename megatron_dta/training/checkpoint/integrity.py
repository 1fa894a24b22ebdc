"""Verifies that a distributed checkpoint is unchanged since it was saved, and that no other user may write to it.

    checksums.json      {"algorithm": "crc32", "files": {NAME: [BYTES, CHECKSUM]}}, for every other file of the folder

If a disk, a file system or a copy corrupts bytes, reading them raises no error and training continues with wrong
weights. CRC-32 detects every single error burst of up to 32 bits and misses one in 4 billion other changes. It protects
against accidents, not against attackers. Checkpoints of Megatron-LM have no checksums and are read without this check.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_dta.common.trust import close_to_others, refuse_foreign
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.restricted_pickle import read_metadata_of

CHECKSUMS = "checksums.json"
SKIP_FLAG = "--skip-checkpoint-checks"
_EARLIER = "load an earlier checkpoint (write its number into latest_checkpointed_iteration.txt)"
_ALGORITHM = "crc32"
_BUFFER_BYTES = 1 << 22
# Number of files read concurrently; zlib releases Python's global interpreter lock.
_THREADS = 4

Checksums = dict[str, tuple[int, str]]


def file_checksum(path: Path) -> tuple[int, str]:
    """Size in bytes and checksum of a file."""
    if not path.is_file():
        # A pipe would block forever.
        raise FileNotFoundError(errno.ENOENT, "is missing", str(path))
    value, size, buffer = 0, 0, memoryview(bytearray(_BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value, size = zlib.crc32(buffer[:count], value), size + count
    return size, f"{value:08x}"


def checksums_of(folder: Path, names: Iterable[str]) -> Checksums:
    """Size in bytes and checksum of some files in ``folder``, by name."""
    listed = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(listed, pool.map(file_checksum, (folder / name for name in listed)), strict=True))


def write_checksums(folder: Path, checksums: Checksums) -> None:
    """Complete a checkpoint, to which from then on only its owner may write."""
    content = {"algorithm": _ALGORITHM, "files": dict(sorted(checksums.items()))}
    with open(folder / CHECKSUMS, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=0)
        file.flush()
        os.fsync(file.fileno())
    close_to_others(folder)


def read_checksums(path: Path) -> Checksums:
    """The expected size and checksum of each file of the checkpoint ``path``; empty if it has no checksums.

    Raises:
        InputError: ``checksums.json`` is damaged.
    """
    file = path / CHECKSUMS
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        if content["algorithm"] != _ALGORITHM:
            raise InputError(f"{file}: has {str(content['algorithm'])[:20]!r} checksums; read it with {SKIP_FLAG}")
        entries = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        if not all(_is_entry(name, *entry) for name, entry in entries.items()):
            raise ValueError
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file}: is damaged; {_EARLIER}, or give {SKIP_FLAG}") from error
    return entries


def _is_entry(name: str, size: Any, checksum: Any) -> bool:
    return name not in ("", ".", "..") and "/" not in name and type(size) is int and isinstance(checksum, str)


def verify_checksums(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Refuse a checkpoint with a file that has changed since it was saved.

    Args:
        share: (i, n) checks only the i-th of n shares of the files, which have about equal numbers of bytes.
    """
    expected = read_checksums(path)
    # Assign the largest files first, each to the smallest share, so that all shares take about the same time.
    loads, names = [0] * share[1], []
    for name in sorted(expected, key=lambda name: (-expected[name][0], name)):
        part = loads.index(min(loads))
        loads[part] += expected[name][0]
        if part == share[0]:
            names.append(name)
    try:
        actual = checksums_of(path, names)
    except (OSError, ValueError) as error:
        where = getattr(error, "filename", None) or path
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    for name in names:
        if actual[name] != expected[name]:
            raise InputError(
                f"{path / name}: is damaged: {_described(actual[name])} here and {_described(expected[name])} when it "
                f"was saved; {_EARLIER}, or give {SKIP_FLAG} to take it as it is"
            )


def _described(entry: tuple[int, str]) -> str:
    return f"{entry[0]} bytes with checksum {entry[1]}"


def check_parts(path: Path) -> int:
    """Total bytes of the checkpoint ``path``.

    Raises:
        InputError: a file is missing or truncated.
    """
    try:
        stored = read_metadata_of(path).storage_data
    except (OSError, pickle.UnpicklingError) as error:
        raise InputError(f"{path}: the checkpoint's metadata cannot be read ({error})") from error
    ends: dict[str, int] = {}
    for part in stored.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            raise InputError(f"{file}: is missing from the checkpoint; write the number of an earlier one")
        if file.stat().st_size < end:
            raise InputError(f"{file}: has {file.stat().st_size} bytes of {end}: the checkpoint is truncated")
    return sum(ends.values())


def refuse_foreign_checkpoint(path: Path) -> None:
    """Refuse a checkpoint that other users of the machine may write."""
    remedy = f"chmod -R go-w {path} if its files are yours and right, or give {SKIP_FLAG}"
    refuse_foreign((path, *sorted(path.iterdir())), remedy)


def check_checkpoint(path: Path) -> None:
    """Run all checks of the checkpoint ``path`` in one process: its permissions and its checksums."""
    refuse_foreign_checkpoint(path)
    verify_checksums(path)
