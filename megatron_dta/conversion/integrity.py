"""Whether a distributed checkpoint is what was saved: its files' checksums and sizes, and who may write to it.

    checksums.json      {"algorithm": "crc32", "files": {NAME: [BYTES, CHECKSUM]}}, for every other file of the folder

A disk, a file system or a copy that changes bytes gives no error when they are read, and training goes on with other
weights. CRC-32 finds every single changed run of up to 32 bits and all but one of 4 billion other changes; it guards
against accidents, not against people. Checkpoints from before there were checksums have none and are read as they are.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.conversion.megatron_files import read_metadata_of

CHECKSUMS = "checksums.json"
SKIP_FLAG = "--skip-checkpoint-checks"
_ALGORITHM = "crc32"
_BUFFER_BYTES = 1 << 22
# Files read at the same time; zlib computes outside Python's global lock.
_THREADS = 4

Checksums = dict[str, tuple[int, str]]


def file_checksum(path: Path) -> tuple[int, str]:
    """Bytes and checksum of a file."""
    if not path.is_file():
        # A pipe would wait for ever.
        raise FileNotFoundError(errno.ENOENT, "is missing", str(path))
    value, size, buffer = 0, 0, memoryview(bytearray(_BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value, size = zlib.crc32(buffer[:count], value), size + count
    return size, f"{value:08x}"


def checksums_of(folder: Path, names: Iterable[str]) -> Checksums:
    """Bytes and checksum of some files in ``folder``."""
    listed = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(listed, pool.map(file_checksum, (folder / name for name in listed)), strict=True))


def write_checksums(folder: Path, checksums: Checksums) -> None:
    """Write the list of checksums."""
    content = {"algorithm": _ALGORITHM, "files": dict(sorted(checksums.items()))}
    with open(folder / CHECKSUMS, "w") as file:
        json.dump(content, file, indent=0)
        file.flush()
        os.fsync(file.fileno())


def read_checksums(path: Path) -> Checksums:
    """What the files of the checkpoint ``path`` should be; nothing if it was written without checksums.

    Raises:
        InputError: the list of checksums itself is damaged.
    """
    file = path / CHECKSUMS
    try:
        content: Any = json.loads(file.read_text())
        if content["algorithm"] != _ALGORITHM:
            raise InputError(f"{file}: has {str(content['algorithm'])[:20]!r} checksums; read it with {SKIP_FLAG}")
        found = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        if not all(_is_entry(name, *entry) for name, entry in found.items()):
            raise ValueError
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file}: is damaged; load an earlier checkpoint, or give {SKIP_FLAG}") from error
    return found


def _is_entry(name: str, size: Any, checksum: Any) -> bool:
    return name not in ("", ".", "..") and "/" not in name and type(size) is int and isinstance(checksum, str)


def verify_checksums(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Refuse a checkpoint with a file that is not what was saved.

    Args:
        share: (i, n) to check only the i-th of n parts of the files, of about the same number of bytes.
    """
    expected = read_checksums(path)
    # The largest first, each to the part that has least: all parts take about as long.
    loads, own = [0] * share[1], []
    for name in sorted(expected, key=lambda name: (-expected[name][0], name)):
        part = loads.index(min(loads))
        loads[part] += expected[name][0]
        if part == share[0]:
            own.append(name)
    try:
        found = checksums_of(path, own)
    except (OSError, ValueError) as error:
        where = getattr(error, "filename", None) or path
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    for name in own:
        if found[name] != expected[name]:
            raise InputError(
                f"{path / name}: is damaged: {_described(found[name])} here and {_described(expected[name])} when it "
                f"was saved; load an earlier checkpoint, or give {SKIP_FLAG} to take it as it is"
            )


def _described(entry: tuple[int, str]) -> str:
    return f"{entry[0]} bytes with checksum {entry[1]}"


def check_parts(path: Path) -> int:
    """Bytes of all parts of the checkpoint ``path``; ``InputError`` names a file that is missing or cut."""
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
            raise InputError(f"{file}: has {file.stat().st_size} bytes of {end}: the checkpoint is cut")
    return sum(ends.values())


def refuse_open_to_all(path: Path) -> None:
    """Refuse a checkpoint that every user of the machine may change while it is read."""
    for each in (path, *sorted(path.glob("*")), *sorted(path.glob(".metadata"))):
        try:
            mode = each.stat().st_mode
        except OSError:
            continue
        if mode & stat.S_IWOTH:
            raise InputError(
                f"{each}: every user may write to it; chmod -R o-w {path} if its files are yours, or give {SKIP_FLAG}"
            )


def check_checkpoint(path: Path) -> None:
    """All checks of the checkpoint ``path`` by one process: nobody else may change it, and it is what was saved."""
    refuse_open_to_all(path)
    verify_checksums(path)
