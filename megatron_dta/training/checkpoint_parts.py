"""Whether all bytes of a distributed checkpoint are there, without reading them.

PyTorch's metadata say in which file, where and how long each part is. Metadata are pickled: read only what you trust.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from megatron_dta.errors import InputError


def check_parts(path: Path) -> int:
    """Bytes of all parts of the checkpoint ``path``; ``InputError`` names a file that is missing or cut."""
    try:
        stored = FileSystemReader(str(path)).read_metadata().storage_data or {}
        ends: dict[str, int] = {}
        for part in stored.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path}: the checkpoint's metadata cannot be read ({reason})") from error
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            raise InputError(f"{file}: is missing from the checkpoint; write the number of an earlier one")
        if file.stat().st_size < end:
            raise InputError(f"{file}: has {file.stat().st_size} bytes of {end}: the checkpoint is cut")
    return sum(ends.values())
