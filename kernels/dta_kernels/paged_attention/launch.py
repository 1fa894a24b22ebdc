"""Attention of new tokens over K and V in pages, for decoding, prefill and the verification of drafts.

The new tokens of a pass are divided into tiles: runs of consecutive tokens of one sequence. All tiles of a launch have
the same number of rows. A tile may hold fewer tokens, or none: a launch that is captured in a CUDA graph has the same
number of tiles in every pass. A token sees every position of its sequence up to its own. K and V of all tiles are
written before the attention runs.

``paged_attention_reference`` and ``write_pages_reference`` are the plain PyTorch references.

Legend: n tokens, T tiles, H query heads, G key/value heads, D head size, P pages, S positions of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dta_kernels.tree_attention.config import padded_head_size, power_of_two, supports
from dta_kernels.tree_attention.reference import accumulation_dtype

if TYPE_CHECKING:
    from dta_kernels.launch import Launcher

TILE_FIELDS = 4
"""A tile's first token, its number of tokens, the position of the first one, and where its page table begins."""

# Longest run for which the keys are divided among programs: longer runs fill a GPU without this.
LONGEST_SPLIT_RUN = 64

# Programs of a launch, if there are that many parts.
_PROGRAMS = 1024

# Up to this number of programs times channels of a head, a decoding launch is too small to hide the memory's latency.
_FEW_CHANNELS = 48 * 1024


@dataclass(frozen=True)
class PagedConfig:
    """Settings of a launch.

    Attributes:
        rows: rows of a tile, tokens times heads of a group; a power of two, at least 16.
        keys: keys of a block; a power of two, at least 16.
        parts: maximum number of programs among which a tile's keys are divided.
        min_part: keys of a part are a multiple of this, itself a multiple of ``keys``.
        num_warps, num_stages: Triton's.
    """

    rows: int
    keys: int
    parts: int
    min_part: int
    num_warps: int
    num_stages: int

    def tokens_of(self, group_size: int) -> int:
        """Maximum number of tokens of a tile, for this number of query heads of each key/value head."""
        return self.rows // group_size


@lru_cache(maxsize=256)
def paged_config(group_size: int, head_size: int, dtype: torch.dtype, run: int, programs: int = 1) -> PagedConfig:
    """Settings for runs of up to ``run`` tokens; ``programs``: tiles times groups of heads of a launch.

    Raises:
        ValueError: the kernels do not support the inputs.
    """
    if not supports(head_size, dtype) or group_size > 128:
        raise ValueError(f"no paged attention kernel for head size {head_size}, {dtype}, {group_size} heads of a group")
    is_wide = padded_head_size(head_size) * dtype.itemsize > 256
    keys, stages = (32, 2) if is_wide else (64, 3)
    least = max(16, power_of_two(group_size))
    if run > LONGEST_SPLIT_RUN:
        return PagedConfig(max(64, least), keys, 1, keys, 4, 2)
    rows = max(least, min(64, power_of_two(group_size * run)))
    decodes, warps = run == 1 and group_size < 16, 4
    if decodes and programs * head_size > _FEW_CHANNELS:
        # Many small programs at once hide the memory's latency.
        keys, warps, stages = 16, 2 if is_wide else 1, 3
    elif rows == 16 and not is_wide:
        # With few programs each reads many keys at once; a processor runs four of them.
        keys, (warps, stages) = 64, (1, 3) if decodes and head_size <= 64 else (2, 2)
    if 2 * programs > _PROGRAMS:  # a tile has one of them, which needs no memory for parts
        return PagedConfig(rows, keys, 1, keys, warps, stages)
    return PagedConfig(rows, keys, 16, 256, warps, stages)


def tiles_of(
    starts: np.ndarray, counts: np.ndarray, table_begins: np.ndarray, first_token: int, tokens: int
) -> np.ndarray:
    """Tiles of at most ``tokens`` tokens for rows that append ``counts[i]`` tokens after ``starts[i]`` positions.

    Args:
        table_begins: where each row's page table begins.
        first_token: first token of the first row; the tokens of the rows are consecutive.

    Returns:
        int64 [T, 4], ``TILE_FIELDS``.
    """
    first = first_token + counts.cumsum() - counts
    if counts.max() <= tokens:
        return np.stack([first, counts, starts, table_begins], axis=1, dtype=np.int64)
    tiles = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts)), tiles)
    offset = tokens * (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    held = np.minimum(tokens, counts[row] - offset)
    return np.stack([first[row] + offset, held, starts[row] + offset, table_begins[row]], axis=1).astype(np.int64)


@dataclass
class Parts:
    """Memory for the parts of split tiles, shared by all layers of a pass, which run one after the other."""

    out: Tensor | None = None
    lse: Tensor | None = None
    arrived: Tensor | None = None

    def at_least(self, config: PagedConfig, query: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers for ``config.parts`` results of ``query`` [n, H, D], float32 [parts, n, H, D] and [parts, n, H], and
        for the number of programs that have arrived, int32 zeros [tiles]; arbitrary ones if there is one part."""
        parts = config.parts
        if parts == 1:
            return (query,) * 3
        if self.out is None or self.out.numel() < parts * query.numel():
            self.out = query.new_empty(parts * query.numel(), dtype=torch.float32)
            self.lse = query.new_empty(parts * query.shape[0] * query.shape[1], dtype=torch.float32)
        if self.arrived is None or self.arrived.numel() < tiles:
            self.arrived = query.new_zeros(tiles, dtype=torch.int32)
        return self.out, self.lse, self.arrived


def paged_attention(
    query_NHD: Tensor, out_NHD: Tensor, addresses: Tensor, num_groups: int, page_size: int, tiles: Tensor,
    tables: Tensor, scale: float, config: PagedConfig, parts: Parts,
) -> None:  # fmt: skip
    """Write the attention of the tokens in ``tiles`` to their rows of ``out_NHD``; other rows are unchanged.

    Args:
        query_NHD: [n, H, D], with adjacent channels.
        out_NHD: of the queries' shape, contiguous.
        addresses: int64 [2] on the device: where the pages of K and of V begin, each [P, S, G, D] of the same dtype.
        tiles: int64 [T, 4], ``tiles_of`` with ``config.tokens_of(H / G)``.
        tables: int64, the page tables, concatenated.
        parts: buffers that are reused between calls.
    """
    n, H, D = query_NHD.shape
    if tiles.shape[0] == 0:
        return
    if query_NHD.stride(2) != 1 or not out_NHD.is_contiguous():
        raise ValueError("paged attention needs queries with adjacent channels and a contiguous output")
    grid = attention_grid(tiles, num_groups, config)
    memory = parts.at_least(config, query_NHD, grid[0])
    _attention_launcher(H, num_groups, D, page_size, config)(
        grid, query_NHD, out_NHD, *memory, addresses, tiles, tables, n, scale, query_NHD.stride(0), query_NHD.stride(1)
    )


def attention_grid(tiles: Tensor, num_groups: int, config: PagedConfig) -> tuple[int, int]:
    """Programs of a launch: tiles x groups, and those that share the parts of one of these."""
    programs = tiles.shape[0] * num_groups
    # Each part is computed alone, so that its result does not depend on the number of programs that share a tile.
    return programs, max(1, min(config.parts, _PROGRAMS // programs))


@lru_cache(maxsize=256)
def _attention_launcher(*shape: Any) -> Launcher:
    from dta_kernels.launch import Launcher
    from dta_kernels.paged_attention.kernels import paged_attention_kernel

    return Launcher(paged_attention_kernel, **attention_constants(*shape))


def attention_constants(
    num_heads: int, num_groups: int, head_size: int, page_size: int, config: PagedConfig
) -> dict[str, Any]:
    """Constants and settings of a launch."""
    from dta_kernels.overlap import overlap_settings

    shape = {"H": num_heads, "G": num_groups, "D": head_size, "BLOCK_D": padded_head_size(head_size), "S": page_size}
    shape |= {"BLOCK_M": config.rows, "BLOCK_N": config.keys, "PARTS": config.parts, "MIN_PART": config.min_part}
    return shape | overlap_settings() | {"num_warps": config.num_warps, "num_stages": config.num_stages}


def write_pages(key_NGD: Tensor, value_NGD: Tensor, addresses: Tensor, slots: Tensor) -> None:
    """Write each token's K and V [n, G, D] to its slot (page x S + offset, int64 [n]); negative slots are skipped.

    addresses: int64 [2] on the device: where the pages of K and of V begin.
    """
    n, G, D = key_NGD.shape
    if n == 0:
        return
    key_NGD, value_NGD = (x if x.stride(2) == 1 else x.contiguous() for x in (key_NGD, value_NGD))
    _write_launcher(G, D)(
        (n,), key_NGD, value_NGD, addresses, slots, key_NGD.stride(0), key_NGD.stride(1), value_NGD.stride(0),
        value_NGD.stride(1),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _write_launcher(num_groups: int, head_size: int) -> Launcher:
    from dta_kernels.launch import Launcher
    from dta_kernels.paged_attention.kernels import write_pages_kernel

    blocks = {"BLOCK_D": padded_head_size(head_size), "BLOCK_G": power_of_two(num_groups)}
    return Launcher(write_pages_kernel, G=num_groups, D=head_size, **blocks, num_warps=4)


def copy_pages(sources: Tensor, targets: Tensor, addresses: Tensor, page_elements: int, dtype: torch.dtype) -> None:
    """Copy whole pages (int64 [n] each, on the device) in all layers, all at once: a source may be another's target.

    addresses: int64 [layers, 2] on the device: where each layer's pages of K and of V begin; the ``page_elements`` of a
    page are contiguous.
    """
    from dta_kernels.paged_attention.kernels import move_pages_kernel

    n, block = sources.shape[0], min(2048, power_of_two(page_elements))
    if n == 0 or addresses.numel() == 0:
        return
    between = torch.empty(addresses.numel() * n * page_elements, dtype=dtype, device=addresses.device)
    grid = (n, addresses.numel(), -(-page_elements // block))
    for pages, gather in ((sources, True), (targets, False)):
        move_pages_kernel[grid](between, addresses, pages, n, page_elements, block, gather, num_warps=4)


def paged_attention_reference(
    query_NHD: Tensor, out_NHD: Tensor, keys_PSGD: Tensor, values_PSGD: Tensor, tiles: Tensor, tables: Tensor,
    scale: float,
) -> None:  # fmt: skip
    """``paged_attention`` tile by tile in plain PyTorch; takes the pages instead of their addresses."""
    page_size, group_size = keys_PSGD.shape[1], query_NHD.shape[1] // keys_PSGD.shape[2]
    dtype = accumulation_dtype(query_NHD.dtype)
    for first, count, position, table_begin in tiles.tolist():
        if count == 0:
            continue
        end = position + count
        pages = tables[table_begin : table_begin + -(-end // page_size)]
        key, value = (
            pool[pages].flatten(0, 1)[:end].to(dtype).repeat_interleave(group_size, dim=1)
            for pool in (keys_PSGD, values_PSGD)
        )
        scores_HQK = torch.einsum("qhd,khd->hqk", query_NHD[first : first + count].to(dtype), key) * scale
        query_position, seen = torch.arange(position, end, device=key.device), torch.arange(end, device=key.device)
        scores_HQK = scores_HQK.masked_fill(seen > query_position[:, None], float("-inf"))
        out = torch.einsum("hqk,khd->qhd", torch.softmax(scores_HQK, dim=-1), value)
        out_NHD[first : first + count] = out.to(out_NHD.dtype)


def write_pages_reference(
    key_NGD: Tensor, value_NGD: Tensor, keys_PSGD: Tensor, values_PSGD: Tensor, slots: Tensor
) -> None:
    """``write_pages`` in plain PyTorch; takes the pages instead of their addresses."""
    written = slots >= 0
    keys_PSGD.flatten(0, 1)[slots[written]] = key_NGD[written]
    values_PSGD.flatten(0, 1)[slots[written]] = value_NGD[written]
