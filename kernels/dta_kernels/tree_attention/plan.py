"""Prepares the block tables of the tree attention kernels and uploads those of several segments in one copy.

A ``TreeAttentionPlan`` holds the block tables of one segment (see ``blocks``) for the tile sizes of one configuration.
The tables do not depend on the layer, so all layers of a step share them. ``key_end`` is not part of the plan: an
engine that has subtree ends on the device computes it there (``local_key_end_on_device``), without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dta_kernels.tree_attention.blocks import BlockMatrix, BlockTable, block_matrix, local_key_end
from dta_kernels.tree_attention.config import KernelConfig, TreeAttentionConfig, default_config, supports

# Every array starts at a multiple of this number of int32 elements.
_ALIGNMENT = 4
# Smallest useful number of programs in a launch: two for each multiprocessor of a large GPU.
_LEAST_PROGRAMS = 264


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


@dataclass(frozen=True)
class BackwardPart:
    """Blocks of keys for dK and dV, and tiles of queries for dQ, of one part of the backward pass."""

    columns: DeviceTable
    rows: DeviceTable


@dataclass(frozen=True)
class TreeAttentionPlan:
    """The block tables of one segment, for one configuration.

    Attributes:
        num_queries, num_keys: N and M = A + N.
        forward: tiles of queries in the forward pass.
        parts: the backward pass, usually in one part. If the dS tiles of as many groups as fill the GPU exceed the
            memory for them, it has several parts, each with some of the query tiles.
        stored_groups: key/value heads whose dS tiles are stored at once.
        stored_elements: elements of the dS buffer: the maximum over the segments that are planned together.
    """

    shape: AttentionShape
    config: TreeAttentionConfig
    num_queries: int
    num_keys: int
    forward: DeviceTable
    parts: tuple[BackwardPart, ...]
    stored_groups: int
    stored_elements: int

    @property
    def num_ancestors(self) -> int:
        return self.num_keys - self.num_queries


@dataclass(frozen=True)
class _HostPlan:
    num_queries: int
    num_keys: int
    tables: list[BlockTable]  # forward, then columns and rows of every part
    stored_groups: int
    stored_elements: int

    def arrays(self) -> list[np.ndarray]:
        return [array for table in self.tables for array in (table.programs, table.blocks, table.tiles)]


def plan_tree_attention(
    segments: Iterable[tuple[np.ndarray, int]],
    shape: AttentionShape,
    device: torch.device,
    config: TreeAttentionConfig | None = None,
) -> list[TreeAttentionPlan]:
    """Plan several segments of a step and upload their tables in one copy, without waiting for the device.

    Args:
        segments: ``(key_end, N)`` of each segment, see ``local_key_end``; N at least 1.
        config: None for the configuration of the table (``default_config``).
    """
    config = config or default_config(shape.head_size, shape.dtype, device)
    hosts = [_host_plan(key_end, num_queries, shape, config) for key_end, num_queries in segments]
    arrays = [array for host in hosts for array in host.arrays()]
    sizes = [array.size for array in arrays]
    begins = np.concatenate([[0], np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])]).tolist()
    packed = torch.empty(begins[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for array, begin in zip(arrays, begins, strict=False):
        packed[begin : begin + array.size] = torch.from_numpy(array.reshape(-1))
    packed = packed.to(device, non_blocking=True)
    pieces = iter([packed[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)])
    stored_elements = max((host.stored_elements for host in hosts), default=0)
    plans = []
    for host in hosts:
        forward, *rest = [DeviceTable(next(pieces).view(-1, 8), next(pieces), next(pieces)) for _ in host.tables]
        parts = tuple(BackwardPart(*pair) for pair in zip(rest[::2], rest[1::2], strict=True))
        plans.append(
            TreeAttentionPlan(
                shape,
                config,
                host.num_queries,
                host.num_keys,
                forward,
                parts,
                host.stored_groups,
                stored_elements,
            )
        )
    return plans


def plan_from_indices(
    query_index: np.ndarray,
    key_index: np.ndarray,
    key_end: np.ndarray,
    shape: AttentionShape,
    device: torch.device,
    config: TreeAttentionConfig | None = None,
) -> tuple[TreeAttentionPlan, Tensor]:
    """Plan and ``key_end`` of one segment from stream indices, in the terms of ``tree_attention_reference``.

    Raises:
        ValueError: the queries are not consecutive, or the keys are not the ancestors in stream order followed by the
            queries' own keys.
    """
    query_index, key_index, key_end = (np.asarray(array, dtype=np.int64) for array in (query_index, key_index, key_end))
    num_queries, num_ancestors = len(query_index), len(key_index) - len(query_index)
    if num_queries == 0 or np.any(np.diff(query_index) != 1):
        raise ValueError("the queries must be consecutive tokens of the stream, at least one")
    if num_ancestors < 0 or not np.array_equal(key_index[num_ancestors:], query_index):
        raise ValueError("the last keys must be the queries' own")
    if np.any(np.diff(key_index) <= 0):
        raise ValueError("keys must come in stream order")
    ends = local_key_end(int(query_index[0]), num_queries, key_end[:num_ancestors], key_end[num_ancestors:])
    return plan_tree_attention([(ends, num_queries)], shape, device, config)[0], torch.from_numpy(ends).to(device)


def local_key_end_on_device(query_index_N: Tensor, key_end_M: Tensor) -> Tensor:
    """``local_key_end`` as int32 [M], computed on the device from stream indices of queries and all subtree ends."""
    num_queries, num_keys = query_index_N.shape[0], key_end_M.shape[0]
    return ((key_end_M - query_index_N[:1]).clamp_(0, num_queries) + (num_keys - num_queries)).int()


def _host_plan(key_end: np.ndarray, num_queries: int, shape: AttentionShape, config: TreeAttentionConfig) -> _HostPlan:
    def matrix(settings: KernelConfig, pack: int) -> BlockMatrix:
        return block_matrix(key_end, num_queries, settings.rows // pack, settings.keys)

    group_size, backward = shape.group_size, config.key_gradients
    forward = matrix(config.forward, config.forward.pack(group_size)).rows()
    pack = backward.pack(group_size)
    by_keys = matrix(backward, pack)
    # Elements of a live block over all heads of a group.
    elements = group_size // pack * backward.rows * backward.keys
    most_tiles = config.stored_scores_bytes // (elements * shape.dtype.itemsize)
    num_tiles = int(by_keys.live.sum())
    # A launch with few groups and few key blocks leaves multiprocessors idle; more parts read and write sums again.
    least_groups = min(shape.num_groups, -(-_LEAST_PROGRAMS // -(-len(key_end) // backward.keys)))
    if num_tiles * least_groups <= most_tiles:
        launches = -(-shape.num_groups // min(shape.num_groups, most_tiles // num_tiles))
        parts = [by_keys.tables()]
    else:
        launches = -(-shape.num_groups // least_groups)
        parts = [by_keys.tables(rows) for rows in by_keys.row_parts(most_tiles * launches // shape.num_groups)]
    stored_groups = -(-shape.num_groups // launches)
    stored_elements = stored_groups * elements * max(part.num_tiles for part in parts)
    tables = [table for part in parts for table in (part.columns, part.rows)]
    return _HostPlan(num_queries, len(key_end), [forward, *tables], stored_groups, stored_elements)
