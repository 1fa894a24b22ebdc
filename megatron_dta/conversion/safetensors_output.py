"""Writes safetensors files whose tensors come piece by piece: the header first, then every piece at its place.

Names and shapes are known before the first weight is, so files are laid out first. The layout is that of transformers:
tensors by name, files by size, or the files of a given checkpoint where it has the same tensors.
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
        offsets: of every tensor, from the start of the file, in the order in which they stand there.
    """

    name: str
    shapes: Shapes
    header: bytes
    offsets: dict[str, int]
    size: int


def lay_out(tensors: Shapes, max_shard_bytes: int, weight_map: dict[str, str] | None = None) -> list[FileLayout]:
    """Which tensor goes into which file.

    Args:
        tensors: in the order of the model.
        max_shard_bytes: a file ends before a tensor that would make it larger.
        weight_map: file of each tensor; if it names the same tensors it decides.
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
    """Text of ``model.safetensors.index.json``; None for a single file that needs none."""
    if [layout.name for layout in layouts] == [SINGLE]:
        return None
    weight_map = {tensor: layout.name for layout in layouts for tensor in layout.shapes}
    total = sum(_bytes(*shape) for layout in layouts for shape in layout.shapes.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"


class SafetensorsOutput:
    """One file being written; its tensors' rows may come in any order, and all of them must come."""

    def __init__(self, folder: Path, layout: FileLayout, advance: Callable[[int], None] = lambda count: None) -> None:
        self._advance = advance
        self.path, self.layout = folder / layout.name, layout
        self._missing = layout.size - len(layout.header)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(memoryview(layout.header), 0)

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Let the tensor's rows from ``row`` on be ``values`` [rows, ...], which lie on the host."""
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
        """Make sure that all is on the disk; raises ``ValueError`` if rows never came."""
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
    # As the safetensors library orders them: larger numbers first, so that all are aligned.
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
