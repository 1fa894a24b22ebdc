"""Selects tile sizes and launch settings of the tree attention kernels from fixed tables.

Nothing is tuned during training. A table by head size and dtype needs no search, and the same settings everywhere keep
results reproducible bit for bit. ``benchmarks/layers/attention.py`` measures other candidates; enter its winners here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

import torch

MAX_HEAD_SIZE = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class KernelConfig:
    """One kernel's settings.

    Attributes:
        rows: rows of a tile of queries (tokens times the heads packed into it), a power of two, at least 16.
        keys: keys of a block, a power of two, at least 16.
        num_warps, num_stages: Triton's.
        tma: read tiles through tensor descriptors (Hopper and later).
        max_pack: maximum number of heads of a group in one tile.
        hopper: use the kernel of ``hopper_forward``, ``hopper_backward`` or ``hopper_query_gradients``, for compute
            capability 9, head sizes 64 and 128, 16-bit inputs; num_warps and num_stages are its own.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool = False
    max_pack: int = 8
    hopper: bool = False

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("keys", self.keys)):
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value}: must be a power of two, at least 16")

    def pack(self, group_size: int) -> int:
        """Heads of a group in one tile: the largest power of two that divides the group, within ``max_pack``."""
        return min(group_size & -group_size, self.max_pack, self.rows)


@dataclass(frozen=True)
class TreeAttentionConfig:
    """Settings of a forward and a backward pass.

    Attributes:
        key_gradients: also sets the size of the stored dS tiles.
        query_gradients: its tile sizes are those of ``key_gradients``; the Hopper kernel takes twice the rows.
        stored_scores_bytes: maximum memory for dS tiles; a single row of blocks may exceed it. A segment that needs
            more runs in several launches, each for some groups or some queries.
        least_tiles: minimum number of tiles of queries of a program that shares a block of keys with others.
    """

    forward: KernelConfig
    key_gradients: KernelConfig
    query_gradients: KernelConfig
    stored_scores_bytes: int = 1 << 30
    least_tiles: int = 16


def supports(head_size: int, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels support these inputs."""
    return 1 <= head_size <= MAX_HEAD_SIZE and dtype in DTYPES


def power_of_two(number: int) -> int:
    """The next one, where Triton may be missing."""
    return 1 << (number - 1).bit_length()


def padded_head_size(head_size: int) -> int:
    """``BLOCK_D`` of the kernels: a power of two, at least the smallest size of a matrix product."""
    return max(16, power_of_two(head_size))


# By padded head size, for 16-bit inputs on Hopper: forward, key gradients, query gradients.
_tma = partial(KernelConfig, tma=True)
_HOPPER = {
    64: (_tma(128, 128, 8, 3), KernelConfig(64, 128, 8, 3), KernelConfig(64, 128, 4, 4)),
    128: (_tma(128, 128, 8, 3), _tma(64, 64, 4, 2), _tma(64, 64, 4, 4)),
    256: (_tma(128, 64, 8, 2), _tma(64, 64, 8, 2), _tma(64, 64, 4, 3)),
}
# The same with the kernels in Gluon, which is experimental: used only with the tested versions of Triton.
_GLUON_VERSIONS = ("3.6.",)
_GLUON_SIZES = (64, 128)
_GLUON = tuple(_tma(rows, 128, 4, stages, hopper=True) for rows, stages in ((128, 2), (64, 2), (128, 6)))
# 16-bit inputs on other GPUs: less shared memory, no tensor descriptors.
_OTHER = {
    64: (KernelConfig(128, 64, 4, 3), KernelConfig(64, 64, 4, 2), KernelConfig(64, 64, 4, 2)),
    128: (KernelConfig(64, 64, 4, 2), KernelConfig(32, 64, 4, 2), KernelConfig(32, 64, 4, 2)),
    256: (KernelConfig(64, 32, 4, 1), KernelConfig(32, 32, 4, 1), KernelConfig(32, 32, 4, 1)),
}
# float32: products run outside the tensor cores, for exactness, with small tiles that fit the registers.
_FLOAT32 = {size: (KernelConfig(tile, tile, 4, 1),) * 3 for size, tile in ((64, 32), (128, 32), (256, 16))}


def default_config(
    head_size: int, dtype: torch.dtype, device: torch.device, gluon: bool | None = None
) -> TreeAttentionConfig:
    """The table's settings for these inputs, which the kernels must support, on this device.

    Args:
        gluon: whether to use the Gluon kernels if there are settings for them; None uses them with the tested versions
            of Triton.
    """
    padded = max(64, padded_head_size(head_size))
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if dtype == torch.float32:
        table = _FLOAT32
    elif not hopper:
        table = _OTHER
    else:
        gluon = _has_tried_gluon() if gluon is None else gluon
        table = dict.fromkeys(_GLUON_SIZES, _GLUON) if gluon and head_size in _GLUON_SIZES else _HOPPER
    config = TreeAttentionConfig(*table[padded])
    if padded_head_size(head_size) == head_size:
        return config
    # Plain loads of keys and values: a padded head is not a rectangle of their matrix.
    forward, queries = replace(config.forward, tma=False), replace(config.query_gradients, tma=False)
    return replace(config, forward=forward, query_gradients=queries)


@cache  # reading a package's version takes as long as planning a segment
def _has_tried_gluon() -> bool:
    try:
        return version("triton").startswith(_GLUON_VERSIONS)
    except PackageNotFoundError:
        return False
