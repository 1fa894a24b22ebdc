"""Attention in which a query's bits depend on its path alone: keys are added in blocks aligned by position.

A query attends to the positions 0 .. p of its path from the root. The blocks of these positions, of one size, are added
in order with a running maximum for every row. A key that a row does not see adds exactly zero, so a block beyond a row
changes nothing. It therefore does not matter which rows share a tile, where segments, pages and forks lie, or whether
the query is trained, prefilled, drafted or decoded.

Queries that follow each other on one path form a run. ``path_tables`` lists the runs of a segment as
``paged_attention`` does those of a decoding pass: a table names the slot of each position of the path, so the kernel of
paged attention serves both, with pages of one position here (``attention_kernel``). ``attend_run`` is the same in plain
PyTorch.

Legend: N queries, M = A + N keys (A ancestors, then the queries' own), H query heads, G key/value heads, J = H / G,
D head size, T tiles, c queries of a run, P positions of its path.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.paged_attention.launch import LONGEST_SPLIT_RUN, TILE_FIELDS, PagedConfig, paged_config, tiles_of
from dta_kernels.tree_attention.reference import accumulation_dtype
from dta_kernels.upload import upload

_BLOCK_KEYS = 64
# Queries of a block on a CPU.
_CPU_ROWS = 16


def invariant_config(group_size: int, head_size: int, dtype: torch.dtype) -> PagedConfig:
    """Settings of the kernel for runs of all lengths: those of long runs, whose keys are not divided."""
    return paged_config(group_size, head_size, dtype, LONGEST_SPLIT_RUN + 1)


class PathTables(NamedTuple):
    """The runs of a segment.

    Attributes:
        starts, counts: int64, position of each run's first query and its number of queries; runs are consecutive.
        begins: int64, where each run's table begins.
        tables: int64, for each run the key (among M) at each position of its path up to its last query.
    """

    starts: np.ndarray
    counts: np.ndarray
    begins: np.ndarray
    tables: np.ndarray


class DeviceTables(NamedTuple):
    """``PathTables`` on the device: tiles int64 [T, 4], and tables."""

    tiles: Tensor
    tables: Tensor

    @classmethod
    def of(
        cls, key_end_M: np.ndarray, num_queries: int, J: int, D: int, dtype: torch.dtype, device: torch.device
    ) -> DeviceTables:
        """The tables of a segment, uploaded without waiting for the device."""
        runs, tokens = path_tables(key_end_M, num_queries), invariant_config(J, D, dtype).tokens_of(J)
        tiles = tiles_of(runs.starts, runs.counts, runs.begins, 0, tokens)
        tiles, tables = upload([tiles, runs.tables], device)
        return cls(tiles.view(-1, TILE_FIELDS), tables)


def path_tables(key_end_M: np.ndarray, num_queries: int) -> PathTables:
    """The runs of a segment by its ``local_key_end``."""
    num_ancestors = len(key_end_M) - num_queries
    own_end = key_end_M[num_ancestors:] - num_ancestors
    # A query continues the run of the one before if it sees it, as then that is its parent.
    is_first = np.concatenate([[True], own_end[:-1] <= np.arange(1, num_queries)])
    bounds = [*np.flatnonzero(is_first).tolist(), num_queries]
    path, paths, starts = np.arange(num_ancestors), [], []
    for begin, end in pairwise(bounds):
        # Ends do not increase along a path, so what a query sees of an earlier path is the beginning of it.
        path = path[: np.count_nonzero(key_end_M[path] > num_ancestors + begin)]
        starts.append(len(path))
        path = np.concatenate([path, np.arange(num_ancestors + begin, num_ancestors + end)])
        paths.append(path)
    lengths = np.array([len(path) for path in paths])
    return PathTables(np.array(starts), np.diff(bounds), np.cumsum(lengths) - lengths, np.concatenate(paths))


def path_attention(
    q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, key_end_M: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``(out_NHD, lse_HN)`` as of ``tree_attention.reference``, by ``attend_run``.

    Args:
        key_end_M: ``local_key_end`` of the segment.
    """
    out_NHD = torch.empty_like(q_NHD)
    lse_HN = q_NHD.new_empty((q_NHD.shape[1], len(q_NHD)), dtype=accumulation_dtype(q_NHD.dtype))
    runs, first = path_tables(key_end_M.cpu().numpy(), len(q_NHD)), 0
    for start, count, begin in zip(runs.starts.tolist(), runs.counts.tolist(), runs.begins.tolist(), strict=True):
        path = torch.from_numpy(runs.tables[begin : begin + start + count]).to(q_NHD.device)
        rows = slice(first, first := first + count)
        out_NHD[rows], lse_HN[:, rows] = attend_run(q_NHD[rows], k_MGD[path], v_MGD[path], start, scale)
    return out_NHD, lse_HN


def attend_run(q_cHD: Tensor, k_PGD: Tensor, v_PGD: Tensor, start: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output [c, H, D] and log-sum-exp [H, c] of the queries at the positions from ``start`` on."""
    dtype, (c, H, D), G = accumulation_dtype(q_cHD.dtype), q_cHD.shape, k_PGD.shape[1]
    # Blocks of one shape, so that no product depends on the lengths.
    missing, unused = -c % _CPU_ROWS, -len(k_PGD) % _BLOCK_KEYS
    q_BRGJD = F.pad(q_cHD.to(dtype), (0, 0, 0, 0, 0, missing)).view(-1, _CPU_ROWS, G, H // G, D)
    q_BGRD = q_BRGJD.transpose(1, 2).flatten(2, 3)
    k_KGDS, v_KGSD = (
        F.pad(x.to(dtype), (0, 0, 0, 0, 0, unused)).view(-1, _BLOCK_KEYS, G, D).transpose(1, 2).contiguous()
        for x in (k_PGD, v_PGD)
    )
    position_R = torch.arange(_CPU_ROWS, device=q_cHD.device).repeat_interleave(H // G) + start
    outputs, sums = [], []
    for block, q_GRD in enumerate(q_BGRD):
        seen_R = position_R + block * _CPU_ROWS
        out_GRD, lse_GR = _attend_blocks(q_GRD.contiguous(), k_KGDS, v_KGSD, seen_R, scale)
        outputs.append(out_GRD.view(G, _CPU_ROWS, -1, D).transpose(0, 1).flatten(1, 2))
        sums.append(lse_GR.view(G, _CPU_ROWS, -1).transpose(0, 1).flatten(1))
    return torch.cat(outputs)[:c].to(q_cHD.dtype), torch.cat(sums)[:c].t()


def _attend_blocks(
    q_GRD: Tensor, k_KGSD: Tensor, v_KGSD: Tensor, position_R: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    acc_GRD, total_GR = torch.zeros_like(q_GRD), q_GRD.new_zeros(q_GRD.shape[:2])
    largest_GR = torch.full_like(total_GR, float("-inf"))
    for block, (k_GSD, v_GSD) in enumerate(zip(k_KGSD, v_KGSD, strict=True)):
        key_S = torch.arange(_BLOCK_KEYS, device=q_GRD.device) + block * _BLOCK_KEYS
        scores_GRS = (q_GRD @ k_GSD.transpose(1, 2)).mul_(scale)
        scores_GRS = scores_GRS.masked_fill_(key_S > position_R[:, None], float("-inf"))
        # The first block has a key that every row sees, so the maximum is finite.
        above_GR = torch.maximum(largest_GR, scores_GRS.amax(-1))
        weight_GRS, decay_GR = torch.exp(scores_GRS - above_GR[..., None]), torch.exp(largest_GR - above_GR)
        total_GR = total_GR * decay_GR + weight_GRS.sum(-1)
        acc_GRD = acc_GRD * decay_GR[..., None] + weight_GRS @ v_GSD
        largest_GR = above_GR
    return acc_GRD / total_GR[..., None], largest_GR + total_GR.log()
