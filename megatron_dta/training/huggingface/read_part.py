"""Converts a Hugging Face checkpoint to a Megatron distributed checkpoint, one piece at a time.

Each piece is read into memory, written and released, so memory use depends neither on the model's size nor on its
largest tensor. Pieces are split where the ranks of the given mesh divide a parameter. A file holds parameters of one
pipeline stage and of one rank's experts, so a rank that loads the checkpoint on that mesh reads whole pieces from few
files. The checkpoint also loads on any other mesh.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.integrity import checksums_of, file_checksum, write_checksums
from megatron_dta.training.huggingface.files import SafetensorsFolder
from megatron_dta.training.huggingface.job import source_stamp
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of, tensors_of
from megatron_dta.training.huggingface.megatron_files import Piece, PieceWriter, extra_states_of, write_metadata
from megatron_dta.training.huggingface.parameters import Parameter, Part, Sharding

PIECE_BYTES = 1 << 25
FILE_BYTES = 1 << 31
# Megatron's names for a checkpoint that was not made by a training step.
RELEASE, TRACKER = "release", "latest_checkpointed_iteration.txt"
_OUTPUTS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass
class ToMegatron:
    """The conversion of one checkpoint; ``conversion.job`` runs it.

    Attributes:
        dtype: dtype of the written weights; None keeps the dtype of each.
        common: plain values for the checkpoint's common state.
    """

    source: Path
    architecture: str
    shape: ModelShape
    tensor_size: int = 1
    pipeline_size: int = 1
    expert_size: int = 1
    dtype: torch.dtype | None = None
    common: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_mesh(self.shape, self.tensor_size, self.pipeline_size, self.expert_size)
        check_tensors(self.reader, self.parameters, self.shape)
        self._check_dtypes()

    def __getstate__(self) -> dict[str, Any]:
        # Omit derived attributes, which include open files.
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @cached_property
    def reader(self) -> SafetensorsFolder:
        return SafetensorsFolder(self.source)

    @cached_property
    def parameters(self) -> list[Parameter]:
        return parameters_of(self.architecture, self.shape, self.reader.prefix)

    @cached_property
    def plan(self) -> dict[str, list[Piece | str]]:
        """The pieces and the names of extra states in every file."""
        groups: dict[int, list[Piece | str]] = {}
        for index, parameter in enumerate(self.parameters):
            group = groups.setdefault(self._group(parameter), [])
            group += self._pieces(index, parameter)
            group += extra_states_of(parameter)
        plan: dict[str, list[Piece | str]] = {}
        for number, group in sorted(groups.items()):
            size, file = FILE_BYTES, -1
            for piece in group:
                own = 0 if isinstance(piece, str) else self._bytes(piece)
                if size + own > FILE_BYTES:
                    size, file = 0, file + 1
                plan.setdefault(f"{RELEASE}/__{number}_{file}.distcp", []).append(piece)
                size += own
        return plan

    def files(self) -> dict[str, int]:
        """Names and sizes of the weight files."""
        return {
            name: sum(self._bytes(piece) for piece in pieces if not isinstance(piece, str))
            for name, pieces in self.plan.items()
        }

    def fingerprint(self) -> dict[str, Any]:
        """The values that the files depend on."""
        settings = {item.name: str(getattr(self, item.name)) for item in fields(self)}
        return {"to": "megatron with checksums", **settings, "source": source_stamp(self.reader.paths)}

    def write_file(self, name: str, folder: Path, advance: Callable[[int], None]) -> dict[str, Any]:
        """Write one file; returns the start and length of each of its pieces, and the file's checksum."""
        (folder / RELEASE).mkdir(exist_ok=True)
        with open(folder / name, "wb") as file:
            writer, memory, own_columns = PieceWriter(file), Scratch(), Scratch()
            block: tuple[tuple[int, tuple[int, int]], Tensor] | None = None
            for piece in self.plan[name]:
                if isinstance(piece, str):
                    writer.append([None])
                    continue
                parameter = self.parameters[piece.parameter]
                # The file stores the column pieces of all ranks for the same rows consecutively: read the rows once.
                if block is None or block[0] != (piece.parameter, piece.rows):
                    block = (piece.parameter, piece.rows), self._read(parameter, piece.rows, memory)
                values = block[1]
                if piece.columns is not None and piece.columns != (0, parameter.shape[1]):
                    values = own_columns.tensor(piece.shape, values.dtype)
                    values.copy_(block[1][:, slice(*piece.columns)])
                own_shape = (piece.rows[1] - piece.rows[0], 1, -1) if parameter.is_filter else piece.shape
                writer.append(values.reshape(*(1 for _ in parameter.stored_at.index), *own_shape))
                advance(self._bytes(piece))
            file.flush()
            os.fsync(file.fileno())
        return {"spans": writer.spans, "checksum": file_checksum(folder / name)}

    def finish(self, folder: Path, records: dict[str, Any]) -> None:
        """Write the metadata and the tracker file."""
        files = {
            Path(name).name: list(zip(pieces, map(tuple, records[name]["spans"]), strict=True))
            for name, pieces in self.plan.items()
        }
        rows = [self._rows(parameter) for parameter in self.parameters]
        dtypes = [self.dtype_of(parameter) for parameter in self.parameters]
        write_metadata(folder / RELEASE, self.parameters, rows, dtypes, files, self.common or {})
        known = {Path(name).name: records[name]["checksum"] for name in self.plan}
        others = checksums_of(folder / RELEASE, ("common.pt", "metadata.json", ".metadata"))
        write_checksums(folder / RELEASE, known | others)
        (folder / TRACKER).write_text(RELEASE, encoding="utf-8")

    def dtype_of(self, parameter: Parameter) -> torch.dtype:
        """The dtype in which a parameter is written."""
        return self.dtype or self.reader.tensors[parameter.blocks[0].tensor].dtype

    def _check_dtypes(self) -> None:
        """Check that a parameter has the same dtype in all layers, as a checkpoint requires."""
        seen: dict[str, tuple[torch.dtype, str]] = {}
        for parameter in self.parameters if self.dtype is None else ():
            for tensor in parameter.tensors:
                dtype = self.reader.tensors[tensor].dtype
                first = seen.setdefault(parameter.stored_at.key, (dtype, tensor))
                if first[0] != dtype:
                    raise InputError(
                        f"{self.source}: {first[1]} is of type {first[0]} and {tensor} of type {dtype}; "
                        "give --params-dtype to have all in one"
                    )

    def _read(self, parameter: Parameter, rows: tuple[int, int], memory: Scratch) -> Tensor:
        part = Part((rows,), parameter.whole().columns)
        values = memory.tensor(part.shape, self.dtype_of(parameter))
        read_part(self.reader, parameter, part, values)
        return values

    def _rows(self, parameter: Parameter) -> int:
        padded = self.shape.padded_vocab_size(self.tensor_size)
        return padded if parameter.sharding is Sharding.VOCABULARY else parameter.shape[0]

    def _bytes(self, piece: Piece) -> int:
        return torch.Size(piece.shape).numel() * self.dtype_of(self.parameters[piece.parameter]).itemsize

    def _group(self, parameter: Parameter) -> int:
        """Number of the group of files (pipeline stage and expert rank) that holds a parameter."""
        if parameter.layer is None:
            stage = 0 if parameter.name.startswith("embedding.") else self.pipeline_size - 1
        else:
            stage = parameter.layer * self.pipeline_size // self.shape.num_layers
        expert_rank = 0
        if parameter.expert is not None and self.shape.num_experts:
            expert_rank = parameter.expert * self.expert_size // self.shape.num_experts
        return stage * self.expert_size + expert_rank

    def _pieces(self, index: int, parameter: Parameter) -> Iterator[Piece]:
        padded = self.shape.padded_vocab_size(self.tensor_size)
        parts = [parameter.part_of_rank(rank, self.tensor_size, padded) for rank in range(self.tensor_size)]
        ranges = sorted({rows for part in parts for rows in part.row_ranges})
        columns = sorted({part.columns for part in parts if part.columns is not None}) or [None]
        row_bytes = torch.Size(parameter.shape[1:]).numel() * self.dtype_of(parameter).itemsize
        step = max(1, PIECE_BYTES // row_bytes)
        for start, stop in ranges:
            for first in range(start, stop, step):
                yield from (Piece(index, (first, min(first + step, stop)), own) for own in columns)


class Scratch:
    """A memory buffer that is reused for one tensor after another, since new memory costs as much as the read."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor whose storage is not larger than itself. It overwrites the previous one."""
        count = torch.Size(shape).numel()
        if len(self._memory) < count * dtype.itemsize:
            self._memory = bytearray(count * dtype.itemsize)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).reshape(shape)


def read_part(reader: SafetensorsFolder, parameter: Parameter, part: Part, into: Tensor) -> None:
    """Fill ``into``, a host tensor of the part's shape, with a part of a parameter."""
    for copy in parameter.copies(part):
        rows = into[copy.row : copy.row + copy.rows]
        reader.read(copy.tensor, copy.tensor_row, rows, part.columns)
    parameter.zero_padding(part, into)


def check_tensors(reader: SafetensorsFolder, parameters: list[Parameter], shape: ModelShape) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model, apart from carried ones."""
    tied = not shape.untie_embeddings_and_output_weights
    embedding = f"{reader.prefix}embed_tokens.weight"
    repeated = [name for name in _OUTPUTS if tied and name in reader.tensors]
    reader.check(tensors_of(parameters), lambda name: name in repeated)
    for name in repeated:
        if not _same_values(reader, name, embedding):
            raise InputError(
                f"{reader.folder}: {name} differs from {embedding}, but config.json ties them; "
                'correct "tie_word_embeddings"'
            )


def _same_values(reader: SafetensorsFolder, left: str, right: str) -> bool:
    shape, step = reader.tensors[left].shape, 4096
    if shape != reader.tensors[right].shape or reader.tensors[left].dtype != reader.tensors[right].dtype:
        return False
    for row in range(0, shape[0], step):
        values = [torch.empty(min(step, shape[0] - row), *shape[1:], dtype=reader.tensors[left].dtype) for _ in "ab"]
        for name, rows in zip((left, right), values, strict=True):
            reader.read(name, row, rows)
        if not torch.equal(values[0].view(torch.uint8), values[1].view(torch.uint8)):
            return False
    return True


def check_mesh(shape: ModelShape, tensor_size: int, pipeline_size: int, expert_size: int) -> None:
    """Refuse a mesh over which the model cannot be divided."""
    for flag, value in (
        ("--num-query-groups", shape.num_query_groups),
        ("--num-attention-heads", shape.num_attention_heads),
        ("--ffn-hidden-size", shape.ffn_hidden_size),
        ("--moe-ffn-hidden-size", shape.moe_ffn_hidden_size or tensor_size),
        ("--linear-num-key-heads", shape.linear_num_key_heads if any(shape.linear_attention_layers) else 0),
        ("--moe-shared-expert-intermediate-size", shape.moe_shared_expert_intermediate_size or 0),
    ):
        if value % tensor_size:
            raise InputError(f"--tensor-model-parallel-size {tensor_size} does not divide the model's {flag} {value}")
    if pipeline_size > shape.num_layers:
        raise InputError(
            f"--pipeline-model-parallel-size {pipeline_size} is more than the model's {shape.num_layers} layers"
        )
    if (shape.num_experts or 1) % expert_size:
        experts = f"{shape.num_experts} experts" if shape.num_experts else "no experts"
        raise InputError(f"--expert-model-parallel-size {expert_size}: the model has {experts}")
