"""Triton kernels that multiply many groups of rows by a separate matrix each in one launch, for the maps of experts.

PyTorch's ``grouped_mm`` needs the matrices of all groups as one tensor and rounds their gradients to 16 bits. Megatron
has a parameter and a float32 gradient buffer for each expert, so every pass would copy all weights and add all weight
gradients, which takes longer than the products of a few hundred rows. These kernels find matrices and buffers in tables
of addresses. Gradients are added in the buffer's precision as they are computed. Nothing waits for the device.

A program handles a tile of rows of a single group. The last tile of a group is padded with its last row, and the
results of the padding are not stored. The result of a row does not depend on the other rows.

Legend: G groups, R rows in all, N outputs and K inputs of a group's matrix [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.upload import upload


@triton.jit(do_not_specialize=["num_tiles"])
def _rows_kernel(
    x_in, matrices_in, like_in, table_in, index_in, y_out, num_tiles, num_groups, OUT: tl.constexpr,
    INNER: tl.constexpr, BACKWARD: tl.constexpr, ALIGNED: tl.constexpr, INDEXED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    group = tl.load(table_in + num_groups + 1 + tile)
    if group < 0:
        return
    first = tl.load(table_in + num_groups + 1 + num_tiles + tile)
    end = tl.load(table_in + group + 1)
    matrix = tl.load(matrices_in + group).to(tl.pointer_type(like_in.dtype.element_ty))
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
    unbounded = first + tl.arange(0, ROWS)
    row = tl.minimum(unbounded, end - 1).to(tl.int64)
    if INDEXED:
        row = tl.load(index_in + row).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, STEP)
    x_at = x_in + row[:, None] * INNER + inner[None, :]
    if BACKWARD:
        matrix_at = matrix + inner[:, None] * OUT + column[None, :]
    else:
        matrix_at = matrix + column[None, :] * INNER + inner[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, INNER, STEP):
        if INNER % STEP:
            x = tl.load(x_at, mask=(begin + inner < INNER)[None, :], other=0.0)
        else:
            x = tl.load(x_at)
        if INNER % STEP or OUT % COLUMNS:
            inside = (begin + inner < INNER)[:, None] & (column < OUT)[None, :]
            weight = tl.load(matrix_at, mask=inside, other=0.0)
        else:
            weight = tl.load(matrix_at)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_at += STEP
        matrix_at += STEP * OUT if BACKWARD else STEP
    target = y_out + unbounded.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(target, total.to(y_out.dtype.element_ty), mask=(unbounded < end)[:, None] & (column < OUT)[None, :])


@triton.jit
def _gradients_kernel(
    grad_in, x_in, sums_io, like_in, table_in, index_in, OUT: tl.constexpr, INNER: tl.constexpr,
    ALIGNED: tl.constexpr, INDEXED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = blocks * ((OUT + ROWS - 1) // ROWS)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    begin, end = tl.load(table_in + group), tl.load(table_in + group + 1)
    if begin == end:
        return
    sums = tl.load(sums_io + group).to(tl.pointer_type(like_in.dtype.element_ty))
    if ALIGNED:
        sums = tl.multiple_of(sums, 16)
    out = tile // blocks * ROWS + tl.arange(0, ROWS)
    inner = tile % blocks * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(begin, end, STEP):
        row, is_own = (first + step).to(tl.int64), (first + step < end)[:, None]
        grad_row, x_row = row, row
        if INDEXED == 1:
            grad_row = tl.load(index_in + row, mask=first + step < end, other=0).to(tl.int64)
        if INDEXED == 2:
            x_row = tl.load(index_in + row, mask=first + step < end, other=0).to(tl.int64)
        grad_at, x_at = grad_in + grad_row[:, None] * OUT + out[None, :], x_in + x_row[:, None] * INNER + inner[None, :]
        grad = tl.load(grad_at, mask=is_own & (out < OUT)[None, :], other=0.0)
        x = tl.load(x_at, mask=is_own & (inner < INNER)[None, :], other=0.0)
        total = tl.dot(tl.trans(grad), x, total, input_precision="ieee")
    target = sums + out[:, None] * INNER + inner[None, :]
    inside = (out < OUT)[:, None] & (inner < INNER)[None, :]
    total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(like_in.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def _table_kernel(
    counts_in, table_out, num_tiles, num_groups, SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    candidate = tl.arange(0, GROUPS)
    counts = tl.load(counts_in + candidate, mask=candidate < num_groups, other=0).to(tl.int32)
    tiles = (counts + SIZE - 1) // SIZE
    is_before = candidate < program
    begin, tile = tl.sum(tl.where(is_before, counts, 0), 0), tl.sum(tl.where(is_before, tiles, 0), 0)
    tl.store(table_out + program, begin)
    # The last program belongs to no group: it marks the unused tiles.
    last = program == num_groups
    group = tl.where(last, -1, program)
    number = tl.where(last, num_tiles - tile, tl.sum(tl.where(candidate == program, tiles, 0), 0))
    for first in range(0, number, BLOCK):
        index = first + tl.arange(0, BLOCK)
        target = table_out + num_groups + 1 + tile + index
        tl.store(target, tl.zeros([BLOCK], dtype=tl.int32) + group, mask=index < number)
        tl.store(target + num_tiles, begin + SIZE * index, mask=index < number)


class _Tiles(NamedTuple):
    """Sizes of a program's tile, its steps along the summed dimension, and launch settings."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


# By bytes of an element. The 16-bit tiles fill the tensor cores of a Hopper GPU. float32 runs outside the tensor cores,
# for exact values, and is meant for checks.
_LARGE = {2: _Tiles(128, 256, 64, 8, 3), 4: _Tiles(64, 64, 32, 4, 2)}
# Groups of few rows waste less of these smaller tiles.
_SMALL = {2: _Tiles(64, 256, 64, 4, 3), 4: _Tiles(64, 64, 32, 4, 2)}
_KERNELS = {"rows": _rows_kernel, "gradients": _gradients_kernel}


@lru_cache
def _launcher(name: str, tiles: _Tiles, **constants: int) -> Launcher:
    sizes = dict(ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step)
    return Launcher(_KERNELS[name], **constants, **sizes, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


@lru_cache
def _table_launcher(size: int, num_groups: int) -> Launcher:
    return Launcher(_table_kernel, SIZE=size, GROUPS=triton.next_power_of_2(num_groups), BLOCK=64, num_warps=4)


class MatrixTable:
    """Contiguous matrices [N, K] of one shape, dtype and device, one for each group, and their addresses."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        first = matrices[0]
        for matrix in matrices:
            if matrix.shape != first.shape or matrix.dtype != first.dtype or not matrix.is_contiguous():
                raise ValueError("matrices of groups must be contiguous and of one shape and dtype")
        # The first matrix gives the kernels the dtype. All are kept, because no other reference to them may exist.
        self.matrices, self.shape = tuple(matrices), tuple(first.shape)
        self._addresses = _addresses(matrices)
        (self.on_device,) = upload([np.array(self._addresses, dtype=np.int64)], first.device)
        # If aligned, columns can be read and written 16 bytes at a time.
        self.is_aligned = not any(address % 16 for address in self._addresses)

    def holds(self, matrices: Sequence[Tensor]) -> bool:
        """Whether the table is of these matrices, and their addresses are unchanged."""
        return self._addresses == _addresses(matrices)


def _addresses(matrices: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(matrix.data_ptr() for matrix in matrices)


class GroupedRows:
    """Rows of G groups, one group after another, and the products of each with its group's matrix.

    A product reads its rows from a tensor [R, ...] or, through the index, from a tensor of any number of rows, so that
    rows in several groups need no copies.

    Only the device needs the number of rows of each group. The number of tiles is the largest that ``num_rows`` rows in
    G groups can need; unused tiles do nothing.

    Args:
        counts_G: integers on the rows' device, rows of each group, any number.
        like: a tensor of the rows' dtype (float32, bfloat16 or float16), on their device.
        num_rows: the sum of the counts, on the host, or more; rows beyond the sum are not computed.
        index_R: integers on the rows' device, for each row its row in an indexed tensor.
        usual_rows: number of rows for which tiles are chosen, by default ``num_rows``.
    """

    def __init__(
        self, counts_G: Tensor, like: Tensor, num_rows: int, index_R: Tensor | None = None,
        usual_rows: int | None = None,
    ) -> None:  # fmt: skip
        self._counts, self.num_rows, self._num_groups = counts_G, num_rows, len(counts_G)
        self._index = index_R
        size = like.element_size()
        self._columns = _LARGE[size]
        usual = num_rows if usual_rows is None else usual_rows
        self._tiles = _LARGE[size] if usual > _LARGE[size].rows * self._num_groups else _SMALL[size]

    @cached_property
    def _table(self) -> tuple[Tensor, int]:
        """(int32: bounds of the groups [G + 1], group of each of T tiles [T], its first row [T]; T)."""
        size, groups = self._tiles.rows, self._num_groups
        num_tiles = min(self.num_rows, (self.num_rows + groups * (size - 1)) // size)
        table = self._counts.new_empty(groups + 1 + 2 * num_tiles, dtype=torch.int32)
        _table_launcher(size, groups)((groups + 1,), self._counts, table, num_tiles, groups)
        return table, num_tiles

    def product(self, x_RK: Tensor, matrices_NK: MatrixTable, indexed: bool = False) -> Tensor:
        """``x @ matrix.T`` [R, N]."""
        return self._multiply(x_RK, matrices_NK, *matrices_NK.shape, False, indexed)

    def input_gradient(self, grad_RN: Tensor, matrices_NK: MatrixTable, indexed: bool = False) -> Tensor:
        """``grad @ matrix`` [R, K]."""
        return self._multiply(grad_RN, matrices_NK, *reversed(matrices_NK.shape), True, indexed)

    def _multiply(
        self, x: Tensor, matrices: MatrixTable, out: int, inner: int, backward: bool, indexed: bool
    ) -> Tensor:
        x = self._checked(x, inner, indexed)
        y = x.new_empty(self.num_rows, out)
        if y.numel():
            table, num_tiles = self._table
            constants = dict(OUT=out, INNER=inner, BACKWARD=backward, ALIGNED=matrices.is_aligned, INDEXED=indexed)
            _launcher("rows", self._tiles, **constants)(
                (num_tiles * ceil_div(out, self._tiles.columns),), x, matrices.on_device, matrices.matrices[0], table,
                self._index if indexed else table, y, num_tiles, self._num_groups,
            )  # fmt: skip
        return y

    def add_weight_gradients(
        self, sums_NK: MatrixTable, grad_RN: Tensor, x_RK: Tensor, indexed: str | None = None
    ) -> None:
        """``sum += grad.T @ x`` over each group's rows, accumulated in float32 in a fixed order and rounded once.

        Args:
            indexed: "grad" or "x" if that tensor is read through the index.
        """
        out, inner = sums_NK.shape
        grad, x = self._checked(grad_RN, out, indexed == "grad"), self._checked(x_RK, inner, indexed == "x")
        if self.num_rows:
            which = {None: 0, "grad": 1, "x": 2}[indexed]
            constants, tiles = dict(OUT=out, INNER=inner, ALIGNED=sums_NK.is_aligned, INDEXED=which), self._columns
            programs, table = ceil_div(out, tiles.rows) * ceil_div(inner, tiles.columns), self._table[0]
            index = self._index if which else table
            _launcher("gradients", tiles, **constants)(
                (self._num_groups * programs,), grad, x, sums_NK.on_device, sums_NK.matrices[0], table, index
            )

    def _checked(self, x: Tensor, columns: int, indexed: bool) -> Tensor:
        if indexed and self._index is None:
            raise ValueError("rows are read through an index, and there is none")
        if x.shape[1:] != (columns,) or (not indexed and len(x) != self.num_rows):
            raise ValueError(f"{self.num_rows} rows of {columns} columns are needed, not {tuple(x.shape)}")
        return x.contiguous()
