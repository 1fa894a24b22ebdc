"""Describes a Megatron parameter: its rows in Hugging Face tensors, and the part of it that a rank holds.

Megatron fuses tensors (query, key and value of each head group; gate and up projection) by rearranging whole rows. So a
parameter is a list of blocks, each of which equals some consecutive rows of a Hugging Face tensor. The blocks determine
both directions: the bytes that a rank reads for its part, and the place of a rank's rows in the exported tensors. Ranks
divide rows (for a gated matrix, the rows of each half) or columns.

Example: a model of hidden size 1 with two head groups has query rows q0 to q3 and key and value rows k0, k1, v0, v1.
The fused parameter has the rows q0 q1 k0 v0 q2 q3 k1 v1, which are six blocks (row, tensor, tensor_row, rows):
(0, q, 0, 2), (2, k, 0, 1), (3, v, 0, 1), (4, q, 2, 2), (6, k, 1, 1), (7, v, 1, 1). With two tensor-parallel ranks,
rank 1 holds rows 4 to 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

# What names of a text model's tensors usually begin with.
PREFIX = "model."


class Sharding(Enum):
    """How tensor-parallel ranks divide a parameter."""

    WHOLE = "the same on every rank"
    ROWS = "rows"
    GATED_ROWS = "rows of each half"
    SECTION_ROWS = "rows of each section"
    COLUMNS = "columns"
    VOCABULARY = "rows, padded to a multiple of the ranks"


class Block(NamedTuple):
    """``rows`` rows of the parameter, starting at ``row``, equal those of ``tensor`` starting at ``tensor_row``."""

    row: int
    tensor: str
    tensor_row: int
    rows: int


@dataclass(frozen=True)
class Part:
    """One rectangle of a parameter, or two that are concatenated along the rows.

    Attributes:
        row_ranges: (start, stop) row ranges of the parameter, concatenated in the part. Rows beyond the parameter's end
            are padding.
        columns: (start, stop) columns; None if the parameter is a vector.
    """

    row_ranges: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that holds the part."""
        rows = sum(stop - start for start, stop in self.row_ranges)
        return (rows,) if self.columns is None else (rows, self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model.

    Attributes:
        name: Megatron's name, with the numbers of layer and expert in the whole model.
        shape: shape without padding of the vocabulary.
        layer, expert: numbers of the layer and the expert; None if the parameter belongs to none.
        sections: numbers of rows of the sections that ranks divide (``SECTION_ROWS``).
        is_filter: whether Hugging Face's tensor, like the module's, has an axis of size 1 between rows and columns.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    blocks: tuple[Block, ...]
    layer: int | None
    expert: int | None
    sections: tuple[int, ...] = ()
    is_filter: bool = False

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors that make up the parameter."""
        rows: dict[str, int] = {}
        for block in self.blocks:
            rows[block.tensor] = rows.get(block.tensor, 0) + block.rows
        inner = (1,) if self.is_filter else ()
        return {name: (count, *inner, *self.shape[1:]) for name, count in rows.items()}

    def whole(self) -> Part:
        """The part that covers the whole parameter, without padding."""
        return Part(((0, self.shape[0]),), self._all_columns())

    def part_of_rank(self, rank: int, size: int, padded_vocab_size: int) -> Part:
        """The part that tensor-parallel rank ``rank`` of ``size`` holds. The sizes must divide evenly."""
        rows, columns = self.shape[0], self._all_columns()
        if self.sharding is Sharding.COLUMNS:
            width = self.shape[1] // size
            return Part(((0, rows),), (rank * width, (rank + 1) * width))
        if self.sharding is Sharding.WHOLE:
            return self.whole()
        if self.sharding in (Sharding.GATED_ROWS, Sharding.SECTION_ROWS):
            sections = self.sections or (rows // 2, rows // 2)
            starts = [sum(sections[:index]) + rank * (section // size) for index, section in enumerate(sections)]
            ends = [start + section // size for start, section in zip(starts, sections, strict=True)]
            return Part(tuple(zip(starts, ends, strict=True)), columns)
        count = (padded_vocab_size if self.sharding is Sharding.VOCABULARY else rows) // size
        return Part(((rank * count, (rank + 1) * count),), columns)

    def copies(self, part: Part) -> Iterator[Block]:
        """Yield the blocks of ``part``, with rows of the part, in order, without padding."""
        part_row = 0
        for start, stop in part.row_ranges:
            for block in self.blocks:
                first, last = max(start, block.row), min(stop, block.row + block.rows)
                if first < last:
                    yield Block(
                        part_row + first - start, block.tensor, block.tensor_row + first - block.row, last - first
                    )
            part_row += stop - start

    def zero_padding(self, part: Part, values: Tensor) -> None:
        """Set the rows of ``values`` that are padding to zero."""
        part_row = 0
        for start, stop in part.row_ranges:
            padding = stop - max(start, self.shape[0])
            part_row += stop - start
            if padding > 0:
                values[part_row - padding : part_row].zero_()

    def split(self, whole: Tensor) -> dict[str, Tensor]:
        """The Hugging Face tensors of the whole parameter (or of its gradient)."""
        pieces: dict[str, list[tuple[int, Tensor]]] = {}
        whole = whole.flatten(1) if self.is_filter else whole
        for copy in self.copies(self.whole()):
            rows = whole[copy.row : copy.row + copy.rows]
            pieces.setdefault(copy.tensor, []).append((copy.tensor_row, rows))
        tensors = {name: _stacked(rows) for name, rows in pieces.items()}
        return {name: tensor.unsqueeze(1) if self.is_filter else tensor for name, tensor in tensors.items()}

    def _all_columns(self) -> tuple[int, int] | None:
        return (0, self.shape[1]) if len(self.shape) > 1 else None


def _stacked(pieces: list[tuple[int, Tensor]]) -> Tensor:
    pieces.sort(key=lambda piece: piece[0])
    return pieces[0][1] if len(pieces) == 1 else torch.cat([rows for _, rows in pieces])


def head_group_blocks(
    tensors: tuple[str, ...], groups: int, queries_per_group: int, head_size: int
) -> tuple[Block, ...]:
    """The blocks of a fused QKV parameter: for each head group its query rows, then its key and value rows."""
    query, key, value = tensors
    query_rows = queries_per_group * head_size
    blocks = []
    for group in range(groups):
        row = group * (query_rows + 2 * head_size)
        blocks.append(Block(row, query, group * query_rows, query_rows))
        blocks.append(Block(row + query_rows, key, group * head_size, head_size))
        blocks.append(Block(row + query_rows + head_size, value, group * head_size, head_size))
    return tuple(blocks)


def concatenated_blocks(tensors: tuple[str, ...], rows: tuple[int, ...]) -> tuple[Block, ...]:
    """The blocks of a parameter that concatenates tensors of the given numbers of rows."""
    return tuple(Block(sum(rows[:index]), tensor, 0, rows[index]) for index, tensor in enumerate(tensors))


def gated_head_group_blocks(
    tensors: tuple[str, ...], groups: int, queries_per_group: int, head_size: int
) -> tuple[Block, ...]:
    """Like ``head_group_blocks`` with a gate for each query head, whose rows follow the queries of the group.

    The first tensor has the rows of each query head followed by those of its gate.
    """
    query, key, value = tensors
    blocks, row = [], 0
    for group in range(groups):
        for is_gate in (0, 1):
            for head in range(queries_per_group):
                first = 2 * (group * queries_per_group + head) + is_gate
                blocks.append(Block(row, query, first * head_size, head_size))
                row += head_size
        for tensor in (key, value):
            blocks.append(Block(row, tensor, group * head_size, head_size))
            row += head_size
    return tuple(blocks)


def interleaved_blocks(
    tensors: tuple[str, ...], sections: tuple[tuple[int, ...], ...], heads: int
) -> tuple[Block, ...]:
    """The blocks of a parameter whose sections each hold one part of every head.

    Args:
        sections: for each tensor, the rows of each of its parts in all heads. The tensor has all parts of the first
            head, then those of the second head, and so on; the parameter has the parts of all heads, part by part.
    """
    blocks, row = [], 0
    for tensor, parts in zip(tensors, sections, strict=True):
        of_head = [part // heads for part in parts]
        for index, rows in enumerate(of_head):
            for head in range(heads):
                blocks.append(Block(row, tensor, head * sum(of_head) + sum(of_head[:index]), rows))
                row += rows
    return tuple(blocks)
