"""Writes safetensors files from pieces of tensors: first the header, then every piece at its offset.

Names and shapes are known before the weights, so the files are laid out first. The layout follows transformers: tensors
sorted by name and files split by size, or the files of a given checkpoint that has the same tensors. Tensors that this
checkpoint has beside the text model are copied from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.huggingface.files import DTYPE_NAMES, SINGLE, StoredTensor, bytes_of
from megatron_dta.training.huggingface.stacked_experts import stack_of, stacked_shape

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
MAX_SHARD_BYTES = 5_000_000_000
_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class FileLayout:
    """One file to write.

    Attributes:
        tensors: shapes and dtypes of the file's tensors, by name.
        shapes: those of the tensors to write: single experts where the file's tensors stack them.
        copied: tensors that are copied from other files.
        offsets: byte offset of every tensor to write or copy from the start of the file, in ascending order.
    """

    name: str
    tensors: Shapes
    shapes: Shapes
    copied: dict[str, StoredTensor]
    header: bytes
    offsets: dict[str, int]
    size: int


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file: the parts that are written one after another, or what it is copied from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Shapes
    origin: StoredTensor | None = None


def lay_out(
    tensors: Shapes,
    max_shard_bytes: int | None,
    weight_map: Mapping[str, str] | None = None,
    copied: Mapping[str, StoredTensor] | None = None,
) -> list[FileLayout]:
    """Assign the tensors to files.

    Args:
        tensors: shapes and dtypes by name, in the order of the model.
        max_shard_bytes: maximum size of a file; only a single larger tensor may exceed it. None uses the files of
            ``weight_map`` if it has all tensors, and otherwise files of 5 GB.
        weight_map: the file of each tensor in another checkpoint; experts are stacked if they are stacked there.
        copied: further tensors, which are copied.
    """
    known = weight_map or {}
    entries = _entries(tensors, known)
    entries |= {name: _Entry(origin.shape, origin.dtype, {}, origin) for name, origin in (copied or {}).items()}
    if max_shard_bytes is None and known.keys() >= entries.keys():
        groups: dict[str, list[str]] = {}
        for name in entries:
            groups.setdefault(known[name], []).append(name)
        return [_layout(name, {tensor: entries[tensor] for tensor in group}) for name, group in sorted(groups.items())]
    shards: list[dict[str, _Entry]] = [{}]
    size = 0
    for name, entry in entries.items():
        own = _bytes(entry.shape, entry.dtype)
        if shards[-1] and size + own > (max_shard_bytes or MAX_SHARD_BYTES):
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += own
    if len(shards) == 1:
        return [_layout(SINGLE, shards[0])]
    return [
        _layout(f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard)
        for number, shard in enumerate(shards, start=1)
    ]


def _entries(tensors: Shapes, known: Mapping[str, str]) -> dict[str, _Entry]:
    """The tensors of the files: ``tensors``, stacked where ``known`` has the stack."""
    parts: dict[str, Shapes] = {}
    for name, described in tensors.items():
        stack = stack_of(name)
        parts.setdefault(stack if stack in known else name, {})[name] = described
    return {
        name: _Entry(stacked_shape([shape for shape, _ in held.values()], name), next(iter(held.values()))[1], held)
        for name, held in parts.items()
    }


def index_of(layouts: list[FileLayout]) -> str | None:
    """Text of ``model.safetensors.index.json``; None for a single file, which needs no index."""
    if [layout.name for layout in layouts] == [SINGLE]:
        return None
    weight_map = {tensor: layout.name for layout in layouts for tensor in layout.tensors}
    total = sum(_bytes(*shape) for layout in layouts for shape in layout.tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"


class SafetensorsOutput:
    """A file in progress. Rows may be written in any order, and all rows must be written."""

    def __init__(self, folder: Path, layout: FileLayout, advance: Callable[[int], None] = lambda count: None) -> None:
        self._advance = advance
        self.path, self.layout = folder / layout.name, layout
        self._missing = layout.size - len(layout.header)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(memoryview(layout.header), 0)

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Write ``values`` [rows, ...], a host tensor, as the tensor's rows starting at ``row``."""
        shape, dtype = self.layout.shapes[name]
        row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        if row + values.shape[0] > shape[0] or tuple(values.shape[1:]) != shape[1:]:
            raise ValueError(f"{name}: rows from {row} on of shape {tuple(values.shape)} are not in {shape}")
        view = bytes_of(values.to(dtype).contiguous())
        self._write(view, self.layout.offsets[name] + row * row_bytes)
        self._missing -= len(view)

    def _write(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count
            self._advance(count)

    def _copy(self, origin: StoredTensor, offset: int) -> None:
        with open(origin.path, "rb") as file:
            file.seek(origin.offset)
            for start in range(0, origin.size, _COPY_BYTES):
                count = min(_COPY_BYTES, origin.size - start)
                view = memoryview(file.read(count))
                if len(view) < count:
                    raise InputError(f"{origin.path}: ended while it was read")
                self._write(view, offset + start)
        self._missing -= origin.size

    def finish(self) -> None:
        """Copy what is to be copied, and flush the file to disk.

        Raises:
            ValueError: some rows were not written.
        """
        for name, origin in self.layout.copied.items():
            self._copy(origin, self.layout.offsets[name])
        if self._missing:
            raise ValueError(f"{self.path}: {self._missing} bytes were never written")
        os.fsync(self._file)

    def __enter__(self) -> SafetensorsOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def _layout(file_name: str, entries: dict[str, _Entry]) -> FileLayout:
    # The order of the safetensors library: wider dtypes first, so that all tensors are aligned.
    ordered = dict(sorted(entries.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, {}
    for name, entry in ordered.items():
        end = position + _bytes(entry.shape, entry.dtype)
        dtype = DTYPE_NAMES[entry.dtype]
        content[name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        for part, described in (entry.parts or {name: (entry.shape, entry.dtype)}).items():
            starts[part] = position
            position += _bytes(*described)
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(
        file_name,
        tensors={name: (entry.shape, entry.dtype) for name, entry in ordered.items()},
        shapes={part: described for entry in ordered.values() for part, described in entry.parts.items()},
        copied={name: entry.origin for name, entry in ordered.items() if entry.origin is not None},
        header=header,
        offsets={name: len(header) + start for name, start in starts.items()},
        size=len(header) + position,
    )


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
