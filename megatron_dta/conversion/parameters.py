"""One parameter of a Megatron model: where its rows stand in Hugging Face tensors, and what a rank holds of it.

Whatever Megatron fuses (query, key and value of each head group; gate and up projection) is a rearrangement of whole
rows, so a parameter is a list of blocks: so many rows of it are so many rows of that tensor. Everything else follows
from the blocks, in both directions: which bytes a rank must read for its part, and where a rank's rows belong in the
tensors it helps to export. Ranks divide rows (of a gated matrix: of each half) or columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class Sharding(Enum):
    """What tensor-parallel ranks divide of a parameter."""

    WHOLE = "the same on every rank"
    ROWS = "rows"
    GATED_ROWS = "rows of each half"
    COLUMNS = "columns"
    VOCABULARY = "rows, filled up to a multiple of the ranks"


class Block(NamedTuple):
    """``rows`` rows of the parameter from ``row`` on are those of ``tensor`` from ``tensor_row`` on."""

    row: int
    tensor: str
    tensor_row: int
    rows: int


class Copy(NamedTuple):
    """``rows`` rows of a part from ``part_row`` on are those of ``tensor`` from ``tensor_row`` on."""

    part_row: int
    tensor: str
    tensor_row: int
    rows: int


class StoredAt(NamedTuple):
    """A parameter's place in a distributed checkpoint, whose tensors may hold those of all layers, or of all experts.

    Attributes:
        key: name of the tensor.
        index: of the parameter along the tensor's first axes.
        count: how many there are along each of these axes.
    """

    key: str
    index: tuple[int, ...]
    count: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A rectangle, or two of them one below the other, of a parameter.

    Attributes:
        row_ranges: (start, stop) rows of the parameter, which stand one below the other in the part; rows beyond the
            parameter's end are padding.
        columns: (start, stop), None where the parameter is a vector.
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
        name: Megatron's, with the layer's and the expert's number in the whole model.
        shape: without padding of the vocabulary.
        layer, expert: None where it belongs to none.
        places: where it may be in a distributed checkpoint; the first is where our models look for it.
    """

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    blocks: tuple[Block, ...]
    layer: int | None
    expert: int | None
    places: tuple[StoredAt, ...]

    @property
    def stored_at(self) -> StoredAt:
        """Where our models have it in a distributed checkpoint."""
        return self.places[0]

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors that make up the parameter."""
        rows: dict[str, int] = {}
        for block in self.blocks:
            rows[block.tensor] = rows.get(block.tensor, 0) + block.rows
        return {name: (count, *self.shape[1:]) for name, count in rows.items()}

    def whole(self) -> Part:
        """All of it, without padding."""
        return Part(((0, self.shape[0]),), self._all_columns())

    def part_of_rank(self, rank: int, size: int, padded_vocab_size: int) -> Part:
        """What tensor-parallel rank ``rank`` of ``size`` holds; the sizes divide evenly."""
        rows, columns = self.shape[0], self._all_columns()
        if self.sharding is Sharding.COLUMNS:
            width = self.shape[1] // size
            return Part(((0, rows),), (rank * width, (rank + 1) * width))
        if self.sharding is Sharding.WHOLE:
            return self.whole()
        if self.sharding is Sharding.GATED_ROWS:
            own = rows // 2 // size
            starts = (rank * own, rows // 2 + rank * own)
            return Part(tuple((start, start + own) for start in starts), columns)
        own = (padded_vocab_size if self.sharding is Sharding.VOCABULARY else rows) // size
        return Part(((rank * own, (rank + 1) * own),), columns)

    def copies(self, part: Part) -> Iterator[Copy]:
        """Where the rows of ``part`` stand in the Hugging Face tensors, in order; padding stands nowhere."""
        part_row = 0
        for start, stop in part.row_ranges:
            for block in self.blocks:
                first, last = max(start, block.row), min(stop, block.row + block.rows)
                if first < last:
                    yield Copy(
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
        for copy in self.copies(self.whole()):
            rows = whole[copy.part_row : copy.part_row + copy.rows]
            pieces.setdefault(copy.tensor, []).append((copy.tensor_row, rows))
        return {name: _stacked(rows) for name, rows in pieces.items()}

    def _all_columns(self) -> tuple[int, int] | None:
        return (0, self.shape[1]) if len(self.shape) > 1 else None


def _stacked(pieces: list[tuple[int, Tensor]]) -> Tensor:
    pieces.sort(key=lambda piece: piece[0])
    return pieces[0][1] if len(pieces) == 1 else torch.cat([rows for _, rows in pieces])


def plain_blocks(tensor: str, rows: int) -> tuple[Block, ...]:
    """The parameter is the tensor."""
    return (Block(0, tensor, 0, rows),)


def stacked_blocks(tensors: tuple[str, ...], rows: int) -> tuple[Block, ...]:
    """The tensors one below the other, ``rows`` in all."""
    each = rows // len(tensors)
    return tuple(Block(index * each, tensor, 0, each) for index, tensor in enumerate(tensors))


def head_group_blocks(
    tensors: tuple[str, ...], groups: int, queries_per_group: int, head_size: int
) -> tuple[Block, ...]:
    """For each head group: its rows of the query tensor, then of the key and the value tensor."""
    query, key, value = tensors
    own = queries_per_group * head_size
    blocks = []
    for group in range(groups):
        row = group * (own + 2 * head_size)
        blocks.append(Block(row, query, group * own, own))
        blocks.append(Block(row + own, key, group * head_size, head_size))
        blocks.append(Block(row + own + head_size, value, group * head_size, head_size))
    return tuple(blocks)
