"""Reads a Hugging Face checkpoint's safetensors files, which are all checked before any rows are read.

A file consists of a length, a JSON header and the raw bytes of every tensor. Rows are read directly into their target
memory, without intermediate copies and without mapping files, whose pages would count as resident memory. Reading
cannot execute code. ``pytorch_model.bin`` is a pickle, which can, so it is refused.

Published folders also hold tensors beside the text model: a vision tower, or heads that predict several tokens. These
are carried: not loaded or trained, and copied unchanged when the trained model is exported.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.huggingface.stacked_experts import matrices_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What names of the text model's tensors begin with: usually the last but one, beside a vision tower the first ones.
PREFIX = "model."
_PREFIXES = ("model.language_model.", "language_model.model.", PREFIX, "")
# Dtypes that weights may have, and those that only carried tensors may have.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CARRIED_DTYPES = DTYPES | {
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
DTYPE_NAMES = {dtype: name for name, dtype in _CARRIED_DTYPES.items()}
# Heads for several tokens, vision towers, and buffers that old versions of transformers saved.
_CARRIED = re.compile(r"(?P<part>(model\.)?(mtp|visual)\.).*|.*\.(?P<buffer>rotary_emb\.inv_freq)")
# Last parts of the names of tensors that only quantized checkpoints have.
_QUANTIZED = re.compile(
    r".*[._](weight_scale(_inv|_2)?|input_scale|weight_(packed|shape|zero_point|g_idx)|qweight|qzeros|scales|g_idx|absmax)"
)
# Maximum header length that the format allows.
_MAX_HEADER = 100_000_000
# Maximum number of dimensions of a PyTorch tensor.
_MAX_AXES = 64
_MOST_SHOWN = 200
# Size in bytes of the buffer for rows that are converted to another dtype.
_BUFFER_BYTES = 1 << 25


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor's bytes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, or of one element of a vector."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFolder:
    """The tensors of a checkpoint folder, by name. Stacked experts are single matrices here.

    Args:
        folder: holds ``model.safetensors.index.json`` and the files it names, or ``model.safetensors``.

    Raises:
        InputError: a file is missing, truncated, or differs from the index; the message names it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.weight_map = _weight_map(self.folder)
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[Path, int] = {}
        headers = {name: read_header(self.folder / name) for name in sorted(set(self.weight_map.values()))}
        for tensor, name in self.weight_map.items():
            if tensor not in headers[name]:
                raise InputError(f"{self.folder / name}: has no tensor {shown(tensor)}, which {INDEX} places there")
            self.tensors |= _unstacked(tensor, headers[name][tensor])
        for name, header in headers.items():
            unlisted = sorted(tensor for tensor in header if self.weight_map.get(tensor) != name)
            if unlisted:
                raise InputError(f"{self.folder / name}: {_some(unlisted)} in it, but {INDEX} does not say so")

    @property
    def prefix(self) -> str:
        """See ``text_prefix``."""
        return text_prefix(self.weight_map)

    @property
    def paths(self) -> list[Path]:
        """All safetensors files."""
        return [self.folder / name for name in sorted(set(self.weight_map.values()))]

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Callable[[str], bool] = lambda name: False) -> None:
        """Refuse a checkpoint whose tensors differ from ``expected`` in name or shape or are not of a weight dtype."""
        quantized = [name for name in self.tensors if _QUANTIZED.fullmatch(name) and not is_carried(name)]
        if quantized:
            raise InputError(
                f"{self.folder}: holds quantized weights ({shown(quantized[0])}), which cannot be trained; use the "
                "checkpoint in bfloat16 or float32"
            )
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise InputError(f"{self.folder}: {_some(missing)} missing; the model in config.json needs it")
        surplus = [name for name in self.tensors if name not in expected and not ignored(name) and not is_carried(name)]
        if surplus:
            raise InputError(f"{self.folder}: {_some(surplus)} not known to the architecture in config.json")
        for name, shape in expected.items():
            stored = self.tensors[name]
            if stored.dtype not in DTYPES.values():
                raise InputError(
                    f"{stored.path}: {name} is of type {DTYPE_NAMES[stored.dtype]}; weights must be one of "
                    f"{', '.join(DTYPES)} (not quantized)"
                )
            if stored.shape != shape:
                raise InputError(
                    f"{stored.path}: {name} has the shape {list(stored.shape)}; config.json says {list(shape)}"
                )

    def read(self, name: str, row: int, into: Tensor, columns: tuple[int, int] | None = None) -> None:
        """Fill ``into`` [rows, ...] with the tensor's rows starting at ``row``, restricted to ``columns`` if given.

        ``into`` is a contiguous host tensor and may have another dtype.
        """
        stored = self.tensors[name]
        if columns == (0, stored.shape[-1]):
            columns = None
        width = stored.row_bytes if columns is None else (columns[1] - columns[0]) * stored.dtype.itemsize
        step = into.shape[0] if into.dtype == stored.dtype else max(1, _BUFFER_BYTES // width)
        for first in range(0, into.shape[0], step):
            rows = into[first : first + step]
            target = rows if rows.dtype == stored.dtype else torch.empty(rows.shape, dtype=stored.dtype)
            self._read_rows(stored, row + first, target, columns)
            if target is not rows:
                rows.copy_(target)

    def _read_rows(self, stored: StoredTensor, row: int, target: Tensor, columns: tuple[int, int] | None) -> None:
        file, view = self._file(stored.path), bytes_of(target)
        start = stored.offset + row * stored.row_bytes
        if columns is None:
            _read_exactly(file, view, start, stored.path)
            return
        skipped, width = columns[0] * stored.dtype.itemsize, (columns[1] - columns[0]) * stored.dtype.itemsize
        for index in range(target.shape[0]):
            own = view[index * width : (index + 1) * width]
            _read_exactly(file, own, start + index * stored.row_bytes + skipped, stored.path)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]

    def close(self) -> None:
        """Close the opened files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Raises:
        InputError: the file is incomplete, or its tensors do not cover exactly its bytes.
    """
    try:
        if path.exists() and not path.is_file():
            # Reading a pipe would block forever.
            raise InputError(f"{path}: is not a file; download the checkpoint again")
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise InputError(f"{path}: truncated or not a safetensors file (its header does not fit)")
            text = file.read(length)
    except FileNotFoundError:
        raise InputError(f"{path}: missing; download the checkpoint again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        spans = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a safetensors file (its header is damaged)") from error
    end = 8 + length
    for tensor, stop in sorted(spans.values(), key=lambda span: (span[0].offset, span[1])):
        if tensor.offset != end:
            raise InputError(f"{path}: not a safetensors file (its tensors overlap or leave gaps)")
        end = stop
    if size != end:
        state = "truncated" if size < end else "longer than its header says"
        raise InputError(f"{path}: {state}: {size} bytes, {end} by its header; download it again")
    return {name: tensor for name, (tensor, _) in spans.items()}


def _stored(path: Path, name: str, entry: dict[str, Any], start: int) -> tuple[StoredTensor, int]:
    """The tensor of a header's entry and the end of its bytes."""
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _CARRIED_DTYPES:
        raise InputError(
            f"{path}: {shown(name)} is of type {shown(entry['dtype'])}; weights must be one of {', '.join(DTYPES)} "
            "(not quantized)"
        )
    (first, last), shape = entry["data_offsets"], entry["shape"]
    if not isinstance(shape, list) or len(shape) > _MAX_AXES or not all(map(_is_count, (first, last, *shape))):
        raise InputError(f"{path}: {shown(name)} has the shape {shown(shape)} at {shown([first, last])}")
    stored = StoredTensor(path, _CARRIED_DTYPES[entry["dtype"]], tuple(shape), start + first)
    if last - first != stored.size:
        raise InputError(f"{path}: {shown(name)} has {last - first} bytes, which its shape {shown(shape)} does not")
    return stored, start + last


def _unstacked(name: str, stored: StoredTensor) -> dict[str, StoredTensor]:
    """The matrices in a tensor that stacks experts, or the tensor itself."""
    if is_carried(name):
        return {name: stored}
    tensors, offset = {}, stored.offset
    for matrix, shape in matrices_of(name, stored.shape):
        tensors[matrix] = replace(stored, shape=shape, offset=offset)
        offset += tensors[matrix].size
    return tensors


def text_prefix(names: Iterable[str]) -> str:
    """What the names of the text model's tensors begin with; ``PREFIX`` if none of ``names`` tells."""
    known = set(names)
    return next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in known), PREFIX)


def prefix_in(folder: str | Path | None) -> str:
    """``text_prefix`` of a folder's tensors."""
    return PREFIX if folder is None else text_prefix(weight_map_of(Path(folder)) or ())


def is_carried(name: str) -> bool:
    """Whether a tensor lies beside the text model, which is all that is trained."""
    return _CARRIED.fullmatch(name) is not None


def carried_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder that are not part of the text model, by name; none if it has no safetensors files.

    Raises:
        InputError: a file that holds some of them is missing or damaged.
    """
    places = {name: file for name, file in (weight_map_of(folder) or {}).items() if is_carried(name)}
    try:
        headers = {file: read_header(folder / file) for file in sorted(set(places.values()))}
        return {name: headers[file][name] for name, file in places.items()}
    except InputError as error:
        raise InputError(f"{error}; tensors in it are exported unchanged: {carried_text(places)}") from None
    except KeyError as error:
        raise InputError(f"{folder}: has no tensor {shown(error.args[0])}, which {INDEX} lists") from None


def carried_text(names: Iterable[str]) -> str | None:
    """How many of these tensors are carried, and of which parts; None if none is."""
    parts: Counter[str] = Counter()
    for name in names:
        carried = _CARRIED.fullmatch(name)
        if carried is not None:
            parts[f"{carried['part']}*" if carried["part"] else carried["buffer"]] += 1
    counted = [f"{count} tensor{'s' if count > 1 else ''} {part}" for part, count in sorted(parts.items())]
    return ", ".join(counted) or None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def shown(value: object) -> str:
    """A name or a value from a file, shortened for a message."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def weight_map_of(folder: Path) -> dict[str, str] | None:
    """The file of every tensor; None if there are no readable safetensors files."""
    try:
        return _weight_map(folder)
    except InputError:
        return None


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return dict.fromkeys(read_header(folder / SINGLE), SINGLE)
        others = next((path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern)), None)
        if others is not None:
            raise InputError(
                f"{folder}: has no safetensors; {others} is a pickle, which can run code and is not read. Save the "
                "model as safetensors first"
            )
        raise InputError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {tensor: str(name) for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: is damaged: it has no readable weight_map") from error
    for name in set(named.values()):
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise InputError(f"{index}: names the file {shown(name)!r}; only safetensors files beside it are read")
    return named


def _read_exactly(file: int, view: memoryview, offset: int, path: Path) -> None:
    while len(view):
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise InputError(f"{path}: ended while it was read")
        view, offset = view[count:], offset + count


def _some(names: Iterable[str]) -> str:
    """The first names and the number of further ones, for a message."""
    listed = [shown(name) for name in names]
    more = f" and {len(listed) - 3} more tensors" if len(listed) > 3 else ""
    return f"{', '.join(listed[:3])}{more} {'is' if len(listed) == 1 else 'are'}"
