"""Prepares the block tables of the tree attention kernels for a segment and uploads them in one copy.

A ``TreeAttentionPlan`` holds the block tables of one segment (see ``blocks``) for the tile sizes of one configuration.
The tables do not depend on the layer, so all layers of a step share them. ``key_end`` goes to the device in the same
copy; where there is no plan, it is computed there from the subtree ends (``local_key_end_on_device``).

The tables of the backward take the host most of the time. They are made at the first backward, while the device
computes the forward, and not at all in a pass without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache, cached_property, partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from dta_kernels.invariant.attention import DeviceTables
from dta_kernels.invariant.products import is_batch_invariant
from dta_kernels.tree_attention.blocks import BlockMatrix, BlockTable, block_matrix
from dta_kernels.tree_attention.config import KernelConfig, TreeAttentionConfig, default_config, supports
from dta_kernels.upload import upload

# Of an H100 or H200.
_MULTIPROCESSORS = 132
# Smallest useful number of programs in a launch.
_LEAST_PROGRAMS = 2 * _MULTIPROCESSORS


@dataclass(frozen=True)
class AttentionShape:
    """Properties shared by all segments: H query heads, G key/value heads (G divides H), head size and dtype."""

    num_heads: int
    num_groups: int
    head_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} query heads are no multiple of {self.num_groups} key/value heads")
        if not supports(self.head_size, self.dtype):
            raise ValueError(f"no Triton tree attention for head size {self.head_size} and {self.dtype}")

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_groups


@dataclass(frozen=True)
class DeviceTable:
    """A ``BlockTable`` on the device."""

    programs: Tensor
    blocks: Tensor
    tiles: Tensor
    num_unfinished: int


@dataclass(frozen=True)
class BackwardPart:
    """Blocks of keys for dK and dV, and blocks of queries for dQ, of one part of the backward pass."""

    columns: DeviceTable
    rows: DeviceTable


@dataclass(frozen=True)
class BackwardPlan:
    """The backward pass, usually in one part. If the dS tiles of as many groups as fill the GPU exceed the memory for
    them, it has several parts, each with some of the query tiles.

    Attributes:
        stored_groups: key/value heads whose dS tiles are stored at once.
        stored_elements: elements of the dS buffer.
        has_shares: whether several programs share a block of keys somewhere.
    """

    parts: tuple[BackwardPart, ...]
    stored_groups: int
    stored_elements: int
    has_shares: bool


@dataclass(frozen=True)
class TreeAttentionPlan:
    """The block tables of one segment, for one configuration.

    Attributes:
        num_queries, num_keys: N and M = A + N.
        key_end: ``local_key_end`` on the device.
        forward: tiles of queries in the forward pass.
        backward: returns the tables of the backward, which the first call makes.
        paths: for a forward pass that is invariant (``dta_kernels.invariant``); None for the usual one.
    """

    shape: AttentionShape
    config: TreeAttentionConfig
    num_queries: int
    num_keys: int
    key_end: Tensor
    forward: DeviceTable
    backward: Callable[[], BackwardPlan]
    paths: DeviceTables | None = None

    @property
    def num_ancestors(self) -> int:
        return self.num_keys - self.num_queries

    @cached_property
    def inputs(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of queries, keys, values and ends of keys."""
        (H, G, D, dtype), N, M = astuple(self.shape), self.num_queries, self.num_keys
        return [((N, H, D), dtype), *[((M, G, D), dtype)] * 2, ((M,), torch.int32)]


def plan_tree_attention(
    key_end: np.ndarray, num_queries: int, shape: AttentionShape, device: torch.device,
    config: TreeAttentionConfig | None = None,
) -> TreeAttentionPlan:  # fmt: skip
    """Plan a segment and upload the tables of its forward, without waiting for the device.

    Args:
        key_end: see ``local_key_end``.
        num_queries: N, at least 1.
        config: None for the configuration of the table (``default_config``).
    """
    config = config or default_config(shape.head_size, shape.dtype, device)
    # Programs for each block of rows: tiles of heads.
    heads = shape.num_heads // config.forward.pack(shape.group_size)
    of_paths = shape.group_size, shape.head_size, shape.dtype
    rows = _matrix(key_end, num_queries, shape, config.forward).rows(_rows_at_once(config.forward, heads))
    (forward,), on_device = _upload_tables([rows], device, key_end)
    return TreeAttentionPlan(
        shape=shape,
        config=config,
        num_queries=num_queries,
        num_keys=len(key_end),
        key_end=on_device,
        forward=forward,
        backward=cache(partial(_plan_backward, key_end, num_queries, shape, device, config)),
        paths=DeviceTables.of(key_end, num_queries, *of_paths, device) if is_batch_invariant() else None,
    )


def _matrix(key_end: np.ndarray, num_queries: int, shape: AttentionShape, settings: KernelConfig) -> BlockMatrix:
    return block_matrix(key_end, num_queries, settings.rows // settings.pack(shape.group_size), settings.keys)


def _plan_backward(
    key_end: np.ndarray, num_queries: int, shape: AttentionShape, device: torch.device, config: TreeAttentionConfig
) -> BackwardPlan:
    """Plan the backward of a segment and upload its tables in one copy, without waiting for the device."""
    backward = config.key_gradients
    by_keys = _matrix(key_end, num_queries, shape, backward)
    # Elements of a live block over all heads of a group.
    elements = shape.group_size // backward.pack(shape.group_size) * backward.rows * backward.keys
    most_tiles = config.stored_scores_bytes // (elements * shape.dtype.itemsize)
    num_tiles = int(by_keys.live.sum())
    together = config.query_gradients.rows // backward.rows if config.query_gradients.hopper else 1
    # A launch with few groups and few key blocks leaves multiprocessors idle; more parts read and write sums again.
    least_groups = min(shape.num_groups, -(-_LEAST_PROGRAMS // -(-len(key_end) // backward.keys)))
    if num_tiles * least_groups <= most_tiles:
        launches = -(-shape.num_groups // min(shape.num_groups, most_tiles // num_tiles))
        rows = [slice(None)]
    else:
        launches = -(-shape.num_groups // least_groups)
        rows = by_keys.row_parts(most_tiles * launches // shape.num_groups, together)
    stored_groups = -(-shape.num_groups // launches)

    def most_blocks(num_blocks: int) -> int:
        # No program has more than an equal share for each of as many as fill the GPU.
        return max(config.least_tiles, -(-num_blocks * stored_groups // _LEAST_PROGRAMS))

    # Programs for each block of rows: tiles of heads whose dS is stored at once.
    chunks = stored_groups * shape.group_size // backward.pack(shape.group_size)
    last = _rows_at_once(config.query_gradients, chunks)
    parts = [by_keys.tables(chunk_rows, most_blocks, together, last) for chunk_rows in rows]
    by_part, _ = _upload_tables([table for part in parts for table in (part.columns, part.rows)], device)
    return BackwardPlan(
        parts=tuple(map(BackwardPart, by_part[::2], by_part[1::2])),
        stored_groups=stored_groups,
        stored_elements=stored_groups * elements * max(part.num_tiles for part in parts),
        has_shares=any(part.has_shares for part in parts),
    )


def _rows_at_once(settings: KernelConfig, programs: int) -> float | None:
    """Blocks of rows that run at once, each in ``programs`` programs; None for kernels whose rows are not shared.

    A program of the Hopper kernels takes a whole multiprocessor.
    """
    return _MULTIPROCESSORS / programs if settings.hopper else None


def _upload_tables(
    tables: list[BlockTable], device: torch.device, *more: np.ndarray
) -> tuple[list[DeviceTable], Tensor | None]:
    """The tables on the device, and the array given beside them."""
    arrays = [array for table in tables for array in (table.programs, table.blocks, table.tiles)]
    pieces = iter(upload([*arrays, *more], device, torch.int32))
    on_device = [DeviceTable(next(pieces).view(-1, 8), *islice(pieces, 2), table.num_unfinished) for table in tables]
    return on_device, next(pieces, None)


def local_key_end_on_device(query_index_N: Tensor, key_end_M: Tensor) -> Tensor:
    """``local_key_end`` as int32 [M], computed on the device from stream indices of queries and all subtree ends."""
    num_queries, num_keys = query_index_N.shape[0], key_end_M.shape[0]
    return ((key_end_M - query_index_N[:1]).clamp_(0, num_queries) + (num_keys - num_queries)).int()
