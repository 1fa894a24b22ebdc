"""Reads tensors and plain values that ``torch.save`` has written, without executing code that a file names.

PyTorch's weights-only unpickler reads them. It knows more names than a checkpoint needs, some of which take any amount
of memory, so the file is first checked against a short list of names and of pickle's opcodes.
"""

from __future__ import annotations

import errno
import io
import pickle
import pickletools
import struct
import zipfile
from typing import Any, BinaryIO

import torch
from torch import Tensor

# What torch.save writes for tensors and plain values.
_NAMES = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"} | {
    f"torch {name}Storage"
    for name in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
}
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_LISTS = {"EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"}
_SCALARS = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_MEMORY = {"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
_CODES = _TUPLES | _LISTS | _SCALARS | _MEMORY | {"PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BINPERSID"}
_MOST_WORK = 10_000_000


class Section(io.RawIOBase):
    """A file-like view of a section of a file, read without intermediate copies."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length = file, start, length
        file.seek(start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        position = {0: 0, 1: self.tell(), 2: self._length}[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, "before the start")
        self._file.seek(self._start + position)
        return position

    def tell(self) -> int:
        return self._file.tell() - self._start

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        return self._file.readinto(view[: max(0, self._length - self.tell())])  # type: ignore[attr-defined]


def load_values(file: Any) -> Any:
    """Tensors and plain values as ``torch.save`` writes them, on the host.

    They are read by PyTorch's weights-only unpickler, whatever the environment says, after a check that the file names
    nothing but tensors and plain values, and that neither it nor its tensors are larger in memory than on the disk.

    Raises:
        pickle.UnpicklingError: the file holds objects that could run code, or is not such an archive.
    """
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > size:
                raise pickle.UnpicklingError(f"its {size} bytes unpack to {unpacked}")
            for entry in archive.infolist():
                if entry.filename.endswith(".pkl"):
                    _check_values(archive.read(entry))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, struct.error) as error:
        raise pickle.UnpicklingError("it is damaged, or was not written by torch.save") from error
    file.seek(0)
    values = torch.load(file, map_location="cpu", weights_only=True)
    _check_tensors(values, size)
    return values


def _check_values(content: bytes) -> None:
    """Refuse a pickle that names anything but tensors and plain values, or repeats its parts without end.

    Objects that share parts can hold more of them than any program can visit. ``work`` bounds how many parts a program
    visits that sees shared ones again and again: fetching a part from memory adds what that part may hold.
    """
    work, latest, held, born = 0, "", {}, {}
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in _CODES or (opcode.name == "GLOBAL" and argument not in _NAMES):
            raise pickle.UnpicklingError(f"it holds {str(argument)[:80] or opcode.name}, which weights_only refuses")
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            if latest in _TUPLES or latest == "REDUCE":
                held[argument] = work
            elif latest not in _SCALARS and latest != "GLOBAL":
                # What is put into a list or a dictionary later counts, too.
                born[argument] = work if latest in ("EMPTY_LIST", "EMPTY_DICT") else 0
            continue
        if opcode.name in ("BINGET", "LONG_BINGET"):
            work += held.get(argument, 0) + (work - born[argument] if argument in born else 0)
        work += 1 + (len(argument) if isinstance(argument, str | bytes) else 0)
        if work > _MOST_WORK + 10 * len(content):
            raise pickle.UnpicklingError("it repeats its parts without end")
        latest = opcode.name


def _check_tensors(values: Any, size: int) -> None:
    """Refuse tensors that have more elements than the file."""
    waiting, seen = [values], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor) and value.numel() * value.itemsize > size:
            raise pickle.UnpicklingError(f"its {size} bytes claim a tensor of {value.numel()} elements")
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
