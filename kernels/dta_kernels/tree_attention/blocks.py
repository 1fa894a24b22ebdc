"""Finds the blocks of keys that each block of queries attends to, on the host, before the step.

One segment has N queries at positions ``A .. A + N - 1`` of a list of ``M = A + N`` keys; the first A keys are the
ancestors. With ``key_end`` in these positions (``local_key_end``), query i sees key m exactly when
``m <= A + i < key_end[m]``.

A pair of a query block and a key block is

- *dead* if no query sees any key;
- *full* if both blocks are whole and every query sees every key, so that no mask is needed;
- *partial* otherwise.

The minimum and maximum of ``key_end`` over the key block decide exactly which of the three it is. The queries of one
root path share long full prefixes. For every row (and column) of the block matrix, the longest run of full blocks is
therefore stored as an interval, and the other full blocks and the partial blocks as lists. A kernel program handles one
row or one column, or a share of a column: many short branches see the keys of their prompt, and a single program for
such a column would still run when all others have ended. The programs with the most work come first.

Example: four ancestors and a segment of two branches, tokens 4-5 and 6-7, with ``key_end = [8 8 8 8 6 6 8 8]``. Blocks
of two queries and two keys give this matrix, in which row 0 has the run [0, 2) and the partial list [2]:

    keys           0-1   2-3   4-5      6-7
    queries 4-5    full  full  partial  dead
    queries 6-7    full  full  dead     partial

This module uses NumPy only and no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Columns of ``BlockTable.programs``.
BLOCK, RUN_BEGIN, RUN_END, LIST_BEGIN, LIST_MIDDLE, LIST_END, TILE_BEGIN, SHARE = range(8)
PROGRAM_FIELDS = 8


@dataclass(frozen=True)
class BlockTable:
    """The blocks that each kernel program visits.

    Attributes:
        programs: int32 [P, 8], the fields of each program: its own block; run begin and run end, the interval of other
            blocks that are full; list begin, list middle and list end, which refer to ``blocks``: full blocks are in
            ``[list begin, list middle)``, partial ones in ``[list middle, list end)``; the begin of its entries in
            ``tiles`` (of rows that several programs may share: the number of programs before it that are not the last
            of their row); its share of the row or column, twice the number of shares before it, plus 1 if it is the
            last.
        blocks: int32, lists of other blocks.
        tiles: int32, for every live pair of blocks in the order run, full, partial: its number when all live pairs
            are counted row by row in that order. A program of several rows has a number for each of them, -1 where the
            row does not see the block.
    """

    programs: np.ndarray
    blocks: np.ndarray
    tiles: np.ndarray

    @property
    def num_unfinished(self) -> int:
        """Number of programs that are not the last of their row or column."""
        return int((self.programs[:, SHARE] % 2 == 0).sum())


@dataclass(frozen=True)
class BlockTables:
    """Tables of one segment's block matrix, or of some of its rows: by rows (query blocks) and by columns (key blocks).

    A program of ``rows`` may have several rows. Columns without a live block are omitted in all parts but the first.
    ``has_shares`` says whether several programs share a column.
    """

    rows: BlockTable
    columns: BlockTable
    num_tiles: int
    has_shares: bool = False


@dataclass(frozen=True)
class BlockMatrix:
    """Which blocks are live, and which of these are full; bool [query blocks, key blocks]."""

    live: np.ndarray
    full: np.ndarray

    def row_parts(self, most_tiles: int, together: int = 1) -> list[slice]:
        """Divide the rows into few consecutive parts of at most ``most_tiles`` live blocks each.

        Of ``together`` rows that one program computes none goes to another part, even if they have more blocks.
        """
        parts, begin, tiles = [], 0, 0
        num_rows = self.live.shape[0]
        counts = np.add.reduceat(self.live.sum(1), np.arange(0, num_rows, together))
        for index, count in enumerate(counts.tolist()):
            if tiles and tiles + count > most_tiles:
                parts.append(slice(begin, index * together))
                begin, tiles = index * together, 0
            tiles += count
        return [*parts, slice(begin, num_rows)]

    def rows(self, at_once: float | None = None) -> BlockTable:
        """The table of all rows, without tiles.

        Args:
            at_once: rows that the GPU computes at once; the last ones are shared (``_share_last_rows``). None gives
                each row one program.
        """
        runs = _longest_runs(self.full)
        table = _table(self.live, self.full, runs, _visits(self.live, self.full, runs), np.zeros(0, np.int32))
        return table if at_once is None else _share_last_rows(table, at_once)

    def tables(
        self, part: slice = slice(None), most_blocks: Callable[[int], int] | None = None, together: int = 1,
        at_once: float | None = None,
    ) -> BlockTables:  # fmt: skip
        """Tables of the rows in ``part``; tiles are counted within it.

        Args:
            most_blocks: the maximum number of blocks that a program of a column visits, given that of all live blocks;
                columns with more are shared by several programs. None gives each column one program.
            together: rows of a program of ``rows``; with several, all its blocks are listed as partial ones.
            at_once: as for ``rows``, of programs with ``together`` rows.
        """
        live, full = self.live[part], self.full[part]
        begin = part.start or 0
        runs = _longest_runs(full)
        visits = row, _, column = _visits(live, full, runs)
        numbers = np.arange(len(row), dtype=np.int32)
        tile = np.full(live.shape, -1, dtype=np.int32)
        tile[row, column] = numbers
        rows = _table(live, full, runs, visits, numbers) if together == 1 else _joined_rows(tile, together)
        if at_once is not None:
            rows = _share_last_rows(rows, at_once)
        runs = _longest_runs(full.T)
        visits = column, _, row = _visits(live.T, full.T, runs)
        columns = _table(live.T, full.T, runs, visits, tile[row, column])
        rows.programs[:, BLOCK] += begin // together
        columns.programs[:, [RUN_BEGIN, RUN_END]] += begin
        columns.blocks[:] += begin
        if begin:
            works = live.any(0)[columns.programs[:, BLOCK]]
            columns = BlockTable(columns.programs[works], columns.blocks, columns.tiles)
        shared = columns
        if most_blocks is not None:
            shared = _divide(columns, np.maximum(1, -(-_work(columns.programs) // most_blocks(len(numbers)))))
        return BlockTables(rows, shared, len(numbers), len(shared.programs) > len(columns.programs))


def local_key_end(query_begin: int, num_queries: int, ancestor_end: np.ndarray, own_end: np.ndarray) -> np.ndarray:
    """``key_end`` int32 [A + N] in key positions, from subtree ends in the stream.

    Args:
        query_begin: stream index of the segment's first token; its tokens are consecutive.
        num_queries: N.
        ancestor_end: subtree ends of the ancestors in earlier segments, in stream order.
        own_end: subtree ends of the segment's tokens.

    Raises:
        ValueError: the lengths do not fit, or a token's subtree does not hold the token itself.
    """
    ends = np.concatenate([ancestor_end, own_end]).astype(np.int64)
    if len(own_end) != num_queries:
        raise ValueError(f"{len(own_end)} subtree ends for {num_queries} queries")
    if np.any(np.asarray(own_end) <= query_begin + np.arange(num_queries)):
        raise ValueError("a subtree ends after its own token, at the earliest")
    # Not np.clip, which takes several times as long.
    within = np.minimum(np.maximum(ends - query_begin, 0), num_queries)
    return (within + len(ancestor_end)).astype(np.int32)


def block_matrix(key_end: np.ndarray, num_queries: int, block_q: int, block_k: int) -> BlockMatrix:
    """The block matrix for blocks of ``block_q`` queries and ``block_k`` keys.

    Args:
        key_end: int32 [M] from ``local_key_end``; one past the last query position that sees the key, at most M.
        num_queries: N, the last N of the M keys are the queries' own.
    """
    num_keys = len(key_end)
    num_ancestors = num_keys - num_queries
    query_first = num_ancestors + np.arange(0, num_queries, block_q)
    query_last = np.minimum(query_first + block_q, num_keys) - 1
    key_first = np.arange(0, num_keys, block_k)
    key_last = key_first + block_k - 1
    most, least = np.maximum.reduceat(key_end, key_first), np.minimum.reduceat(key_end, key_first)
    # The key of one of the block's own queries makes a block live by its position alone.
    reaches = (most > query_first[:, None]) | (np.minimum(key_last, num_keys - 1) >= query_first[:, None])
    live = (key_first <= query_last[:, None]) & reaches
    # The last blocks may be incomplete; they count as partial, so that they are read with a mask.
    full = (key_last <= query_first[:, None]) & (least > query_last[:, None]) & (key_last < num_keys)
    full &= (query_last - query_first + 1 == block_q)[:, None]
    return BlockMatrix(live, full)


def _longest_runs(full: np.ndarray) -> np.ndarray:
    """Begin and end of the longest run of true values in each row (the first of equals), [rows, 2]; 0, 0 if none."""
    runs = np.zeros((full.shape[0], 2), dtype=np.int64)
    padded = np.zeros((full.shape[0], full.shape[1] + 2), dtype=np.int8)
    padded[:, 1:-1] = full
    change = np.diff(padded, axis=1)
    row, begin = np.divmod(np.flatnonzero(change == 1), change.shape[1])
    end = np.flatnonzero(change == -1) % change.shape[1]
    # Of several assignments to one row the last one stays: the longest run and, of equal lengths, the first.
    order = np.lexsort((-begin, end - begin))
    runs[row[order], 0], runs[row[order], 1] = begin[order], end[order]
    return runs


def _visits(live: np.ndarray, full: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(row, kind, column)`` of all live pairs, row by row: the run (0), other full blocks (1), partial ones (2)."""
    block = np.arange(live.shape[1])
    in_run = (block >= runs[:, :1]) & (block < runs[:, 1:])
    # Flat indices, divided afterwards: several times as fast as indices along three axes.
    visit = np.flatnonzero(np.stack([in_run, full & ~in_run, live & ~full], axis=1))
    row_and_kind, column = np.divmod(visit, live.shape[1])
    return row_and_kind // 3, row_and_kind % 3, column


def _table(
    live: np.ndarray, full: np.ndarray, runs: np.ndarray, visits: tuple[np.ndarray, np.ndarray, np.ndarray],
    tiles: np.ndarray,
) -> BlockTable:  # fmt: skip
    num_rows = live.shape[0]
    _, kind, column = visits
    work = live.sum(1)
    num_full, num_partial = full.sum(1) - (runs[:, 1] - runs[:, 0]), work - full.sum(1)
    ends = np.cumsum(num_full + num_partial)
    programs = np.zeros((num_rows, PROGRAM_FIELDS), dtype=np.int32)
    programs[:, BLOCK] = np.arange(num_rows)
    programs[:, RUN_BEGIN], programs[:, RUN_END] = runs[:, 0], runs[:, 1]
    programs[:, LIST_BEGIN] = ends - num_full - num_partial
    programs[:, LIST_MIDDLE] = ends - num_partial
    programs[:, LIST_END] = ends
    programs[:, TILE_BEGIN] = np.cumsum(work) - work
    programs[:, SHARE] = 1
    heaviest_first = np.argsort(-work, kind="stable")
    return BlockTable(programs[heaviest_first], column[kind > 0].astype(np.int32), tiles)


def _joined_rows(tile: np.ndarray, together: int) -> BlockTable:
    """The table whose programs have several adjacent rows each, from the tiles of all blocks (-1 where not live)."""
    num_rows, num_columns = tile.shape
    num_programs = -(-num_rows // together)
    padded = np.full((num_programs * together, num_columns), -1, dtype=np.int32)
    padded[:num_rows] = tile
    of_each = [padded[index::together] for index in range(together)]
    live = np.maximum.reduce(of_each) >= 0
    visit = np.flatnonzero(live)
    program, column = np.divmod(visit, num_columns)
    tiles = np.stack([rows.ravel()[visit] for rows in of_each], axis=1).ravel()
    no_runs = np.zeros((num_programs, 2), dtype=np.int64)
    return _table(live, np.zeros_like(live), no_runs, (program, np.full(len(visit), 2), column), tiles)


def _work(programs: np.ndarray) -> np.ndarray:
    """Blocks that each program visits."""
    return programs[:, RUN_END] - programs[:, RUN_BEGIN] + programs[:, LIST_END] - programs[:, LIST_BEGIN]


def _share_last_rows(table: BlockTable, at_once: float, least_blocks: int = 6) -> BlockTable:
    """The table with several programs for each of the last rows, which would leave most of the GPU idle.

    If the GPU computes 16.5 rows at once, the last 6 of 72 run beside nothing else, for as long as one of them takes.
    Two programs for each take half of that.
    """
    programs = table.programs
    left = len(programs) % at_once if len(programs) > at_once else len(programs)
    shares = np.ones(len(programs), dtype=np.int64)
    if left:
        last = slice(len(programs) - int(np.ceil(left)), None)
        shares[last] = np.clip(_work(programs)[last] // least_blocks, 1, min(8, max(1, int(at_once // left))))
    divided = _divide(table, shares)
    is_unfinished = divided.programs[:, SHARE] % 2 == 0
    divided.programs[:, TILE_BEGIN] = np.cumsum(is_unfinished) - is_unfinished
    return divided


def _divide(table: BlockTable, shares: np.ndarray) -> BlockTable:
    """The table with ``shares`` programs in place of each one, those that visit most blocks first.

    The programs of a row or column follow each other in their order: each one waits until those before it have added
    or left their sums, which must therefore have started.
    """
    programs = table.programs
    work = _work(programs)
    run = programs[:, RUN_END] - programs[:, RUN_BEGIN]
    heaviest_first = np.argsort(-work / shares, kind="stable")
    index = np.repeat(heaviest_first, shares[heaviest_first])
    run, work, shares = run[index], work[index], shares[index]
    # The number of a share within its row or column: a count that begins anew where that changes.
    number = np.arange(len(index))
    number -= np.maximum.accumulate(np.where(np.diff(index, prepend=-1) != 0, number, 0))
    begin, end = work * number // shares, work * (number + 1) // shares
    programs = programs[index]
    programs[:, RUN_END] = programs[:, RUN_BEGIN] + np.minimum(end, run)
    programs[:, RUN_BEGIN] += np.minimum(begin, run)
    programs[:, LIST_END] = programs[:, LIST_BEGIN] + np.maximum(end - run, 0)
    programs[:, LIST_BEGIN] += np.maximum(begin - run, 0)
    middle = np.maximum(programs[:, LIST_MIDDLE], programs[:, LIST_BEGIN])
    programs[:, LIST_MIDDLE] = np.minimum(middle, programs[:, LIST_END])
    programs[:, TILE_BEGIN] += begin
    programs[:, SHARE] = 2 * number + (number == shares - 1)
    return BlockTable(programs, table.blocks, table.tiles)
