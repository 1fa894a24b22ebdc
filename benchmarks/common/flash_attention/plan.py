"""Prepares the lists of key and query blocks that FlashAttention 4 visits for a segment, and uploads them in one copy.

FlashAttention 4 reads, for every block of 128 queries, the blocks of keys that it sees partly and those that all of its
queries see; its backward reads the same by blocks of keys. Blocks at the end of the queries or keys that are not whole
count as partial, because the library checks bounds only under a mask. In the lists, blocks ascend: the last one comes
first in its forward, and only there it checks the end of the keys.

This module needs neither the library nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import numpy as np
import torch
from torch import Tensor

from dta_kernels.tree_attention.blocks import block_matrix
from dta_kernels.tree_attention.plan import AttentionShape
from dta_kernels.upload import upload

PACKAGE = "flash-attn-4"
# The adapter calls internal functions of the library, so it works with this version only.
VERSION = "4.0.0b36"
HEAD_SIZES = (64, 96, 128)
DTYPES = (torch.bfloat16, torch.float16)
# Tiles of the library's kernels on Hopper for these head sizes.
BLOCK = 128


def installed_version() -> str | None:
    """The installed version of the library, None without it."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def flash_refusal(shape: AttentionShape, device: torch.device) -> str | None:
    """Why the library cannot compute attention of this shape, to follow the flag; None if it can."""
    version = installed_version()
    if version != VERSION:
        return f"needs {PACKAGE}=={VERSION}, not {version or 'none'}"
    if shape.dtype not in DTYPES or shape.head_size not in HEAD_SIZES or shape.group_size == 1:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"takes 16 bits, heads of {sizes} channels and several query heads per key/value head"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "needs a Hopper GPU (compute capability 9)"
    return None


@dataclass(frozen=True)
class BlockLists:
    """For every row of blocks, the other blocks that it visits.

    Attributes:
        partial_count, full_count: int32 [1, 1, R], entries of each row in use.
        partial, full: int32 [1, 1, R, W], block numbers in ascending order.
    """

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


@dataclass(frozen=True)
class FlashAttentionPlan:
    """The block lists of one segment.

    Attributes:
        num_queries, num_keys: N and M = A + N.
        forward: blocks of keys for each block of queries.
        backward: blocks of queries for each block of keys.
    """

    shape: AttentionShape
    num_queries: int
    num_keys: int
    forward: BlockLists
    backward: BlockLists

    @property
    def num_ancestors(self) -> int:
        return self.num_keys - self.num_queries


def plan_flash_attention(
    key_end: np.ndarray, num_queries: int, shape: AttentionShape, device: torch.device
) -> FlashAttentionPlan:
    """Plan a segment and upload its lists in one copy, without waiting for the device.

    Args:
        key_end: see ``blocks.local_key_end``.
        num_queries: N, at least 1.
    """
    matrix = block_matrix(key_end, num_queries, BLOCK, BLOCK)
    partial, full = matrix.live & ~matrix.full, matrix.full
    arrays = [array for blocks in (partial, full, partial.T, full.T) for array in block_lists(blocks)]
    # One entry for any batch and head.
    uploaded = [
        vector.view(1, 1, *array.shape)
        for vector, array in zip(upload(arrays, device, torch.int32), arrays, strict=True)
    ]
    return FlashAttentionPlan(shape, num_queries, len(key_end), BlockLists(*uploaded[:4]), BlockLists(*uploaded[4:]))


def block_lists(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of true columns in each row of a matrix, int32 [R], and the columns in ascending order, [R, W]."""
    counts = blocks.sum(1)
    columns = np.zeros((len(blocks), max(1, int(counts.max(initial=0)))), dtype=np.int32)
    row, column = np.nonzero(blocks)
    columns[row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)] = column
    return counts.astype(np.int32), columns
