"""What the tree attention kernels need of a step's segments, on the device: made once, uploaded in one copy.

A ``TreeAttentionPlan`` holds one segment's ``key_end`` and block tables (see ``tree_attention_blocks``) for the tile
sizes of one configuration. Nothing in it depends on a layer, so all layers of a step share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dta_kernels.tree_attention_blocks import BlockTable, block_tables, local_key_end
from dta_kernels.tree_attention_config import TreeAttentionConfig, default_config, supports

# Every array starts at a multiple of so many int32 numbers.
_ALIGNMENT = 4


@dataclass(frozen=True)
class AttentionShape:
    """What all segments have in common: H query heads, G key/value heads (H a multiple), head size and dtype."""

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
class TreeAttentionPlan:
    """One segment, for one configuration.

    Attributes:
        num_queries, num_keys: N and M = A + N.
        key_end: int32 [M], see ``local_key_end``.
        forward: tiles of queries in the forward pass.
        columns: blocks of keys in the backward pass.
        rows: tiles of queries of the kernel that computes dQ.
        stored_groups: key/value heads whose tiles of dS are stored at once; 0 where dS is computed again.
        stored_elements: elements of the buffer for them, the same in all segments of a step.
    """

    shape: AttentionShape
    config: TreeAttentionConfig
    num_queries: int
    num_keys: int
    key_end: Tensor
    forward: DeviceTable
    columns: DeviceTable
    rows: DeviceTable
    stored_groups: int
    stored_elements: int

    @property
    def num_ancestors(self) -> int:
        return self.num_keys - self.num_queries


@dataclass(frozen=True)
class _HostPlan:
    num_queries: int
    key_end: np.ndarray
    forward: BlockTable
    columns: BlockTable
    rows: BlockTable
    stored_groups: int
    stored_elements: int

    def arrays(self) -> list[np.ndarray]:
        tables = (self.forward, self.columns, self.rows)
        return [self.key_end, *(array for t in tables for array in (t.programs, t.blocks, t.tiles))]


def plan_tree_attention(
    segments: Sequence[tuple[np.ndarray, int]],
    shape: AttentionShape,
    device: torch.device,
    config: TreeAttentionConfig | None = None,
) -> list[TreeAttentionPlan]:
    """Plans of all segments of a step, in one upload that does not wait for the device.

    Args:
        segments: ``(key_end, N)`` of each segment, see ``local_key_end``; N at least 1.
        config: None for the table's.
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
        key_end = next(pieces)
        forward, columns, rows = (
            DeviceTable(next(pieces).view(-1, 8), next(pieces), next(pieces)) for _ in range(3)
        )
        plans.append(
            TreeAttentionPlan(
                shape, config, host.num_queries, len(host.key_end), key_end, forward, columns, rows,
                host.stored_groups, stored_elements,
            )  # fmt: skip
        )
    return plans


def plan_from_indices(
    query_index: np.ndarray,
    key_index: np.ndarray,
    key_end: np.ndarray,
    shape: AttentionShape,
    device: torch.device,
    config: TreeAttentionConfig | None = None,
) -> TreeAttentionPlan:
    """Plan of one segment from stream indices, in the terms of ``tree_attention_reference``.

    Raises:
        ValueError: the queries are not consecutive, or the keys are not ancestors in stream order and then the
            queries' own.
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
    return plan_tree_attention([(ends, num_queries)], shape, device, config)[0]


def _host_plan(
    key_end: np.ndarray, num_queries: int, shape: AttentionShape, config: TreeAttentionConfig
) -> _HostPlan:
    def tables(rows: int, keys: int, pack: int):
        return block_tables(key_end, num_queries, rows // pack, keys)

    group_size, backward = shape.group_size, config.key_gradients
    forward = tables(config.forward.rows, config.forward.keys, config.forward.pack(group_size)).rows
    pack = backward.pack(group_size)
    key_tables = tables(backward.rows, backward.keys, pack)
    elements_of_group = key_tables.num_tiles * (group_size // pack) * backward.rows * backward.keys
    bytes_of_group = elements_of_group * shape.dtype.itemsize
    stored_groups = min(shape.num_groups, config.stored_scores_bytes // bytes_of_group)
    if stored_groups:
        launches = -(-shape.num_groups // stored_groups)
        stored_groups = -(-shape.num_groups // launches)
        rows = key_tables.rows
    else:
        again = config.query_gradients
        rows = tables(again.rows, again.keys, pack).rows
    return _HostPlan(
        num_queries, key_end, forward, key_tables.columns, rows, stored_groups, stored_groups * elements_of_group
    )
