"""Writes safetensors files from pieces of tensors: first the header, then every piece at its offset.

Names and shapes are known before the weights, so the files are laid out first. The layout follows transformers: tensors
sorted by name and files split by size, or the files of a given checkpoint that has the same tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_dta.conversion.safetensors_files import DTYPE_NAMES, SINGLE, bytes_of

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class FileLayout:
    """One file to write.

    Attributes:
        offsets: byte offset of every tensor from the start of the file, in ascending order.
    """

    name: str
    shapes: Shapes
    header: bytes
    offsets: dict[str, int]
    size: int


def lay_out(tensors: Shapes, max_shard_bytes: int, weight_map: dict[str, str] | None = None) -> list[FileLayout]:
    """Assign the tensors to files.

    Args:
        tensors: shapes and dtypes by name, in the order of the model.
        max_shard_bytes: maximum size of a file; only a single larger tensor may exceed it.
        weight_map: file of each tensor; it is used if it names the same tensors.
    """
    if weight_map is not None and weight_map.keys() == tensors.keys():
        groups: dict[str, list[str]] = {}
        for name in tensors:
            groups.setdefault(weight_map[name], []).append(name)
        return [_layout(name, {tensor: tensors[tensor] for tensor in group}) for name, group in sorted(groups.items())]
    shards: list[Shapes] = [{}]
    size = 0
    for name, (shape, dtype) in tensors.items():
        own = _bytes(shape, dtype)
        if shards[-1] and size + own > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (shape, dtype)
        size += own
    if len(shards) == 1:
        return [_layout(SINGLE, shards[0])]
    return [
        _layout(f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard)
        for number, shard in enumerate(shards, start=1)
    ]


def index_of(layouts: list[FileLayout]) -> str | None:
    """Text of ``model.safetensors.index.json``; None for a single file, which needs no index."""
    if [layout.name for layout in layouts] == [SINGLE]:
        return None
    weight_map = {tensor: layout.name for layout in layouts for tensor in layout.shapes}
    total = sum(_bytes(*shape) for layout in layouts for shape in layout.shapes.values())
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

    def finish(self) -> None:
        """Flush the file to disk.

        Raises:
            ValueError: some rows were not written.
        """
        if self._missing:
            raise ValueError(f"{self.path}: {self._missing} bytes were never written")
        os.fsync(self._file)

    def __enter__(self) -> SafetensorsOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def _layout(file_name: str, shapes: Shapes) -> FileLayout:
    # The order of the safetensors library: wider dtypes first, so that all tensors are aligned.
    ordered = dict(sorted(shapes.items(), key=lambda item: (-item[1][1].itemsize, item[0])))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, {}
    for name, (shape, dtype) in ordered.items():
        end = position + _bytes(shape, dtype)
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        starts[name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return FileLayout(file_name, ordered, header, offsets, len(header) + position)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
