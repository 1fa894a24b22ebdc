"""Decodes with a paged K/V cache: one pass appends tokens to sequences, and each token attends to its own sequence.

A pass may contain prefill (a run of prompt tokens), decoding (one token a sequence) or both. Matrix products run over
all tokens of the pass together, attention over groups of sequences of similar size. Nothing here is differentiated:
training uses ``segment_context``.

Attention gathers each group's pages and calls PyTorch's ``scaled_dot_product_attention`` with a mask by length. The
query heads that share a key head become queries of that head, so K and V are never repeated. On a GPU,
``paged_context`` is used instead; its kernels read the pages in place.

Legend: n new tokens of the pass, B sequences (rows) of a group, R longest run of new tokens in it, W widest page table,
S positions of a page, T cached positions of its longest row, G key/value heads on this rank, J query heads of each,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.invariant.attention import attend_run
from dta_kernels.invariant.products import is_batch_invariant
from dta_kernels.upload import upload
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.decode.paged_cache import PagedCache

# Shorter rows join a group while at most this many (query, key) pairs of padding are computed: about the cost of the
# calls for one more group.
_PADDED_PAIRS = 1 << 14


@dataclass(frozen=True)
class RowGroup:
    """Rows whose attention is computed in one call.

    Attributes:
        tokens: the pass's tokens of these rows, row by row.
        pages: int64 [B, W], page tables, padded with arbitrary pages.
        row_index: int64 [tokens], position of each token in the padded block [B x R]; None without padding.
        run: R.
        end: T.
        visible: bool [B, 1, R, T]; None if every query sees all positions.
    """

    tokens: slice
    pages: Tensor
    row_index: Tensor | None
    run: int
    end: int
    visible: Tensor | None


@dataclass
class DecodeContext(AttentionContext):
    """One decoding pass; made by ``append_context``.

    Attributes:
        cache: receives K and V of the new tokens.
        slots: int64 [n], the slots of the new tokens in the cache.
        groups: the rows of the pass; the tokens of each group follow those of the previous one.
    """

    cache: PagedCache | None = None
    slots: Tensor | None = None
    groups: list[RowGroup] = field(default_factory=list)

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # All rows are written first, because a row may read tokens that another row of this pass has just computed.
        self.cache.write(layer_number, self.slots, key, value)
        keys_PSGD, values_PSGD = self.cache.keys[layer_number], self.cache.values[layer_number]
        if is_batch_invariant():
            return self._attend_runs(query, keys_PSGD, values_PSGD, scale)
        outputs = [attend_group(group, query[group.tokens], keys_PSGD, values_PSGD, scale) for group in self.groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_runs(self, query: Tensor, keys_PSGD: Tensor, values_PSGD: Tensor, scale: float) -> Tensor:
        """``attend`` row by row, see ``dta_kernels.invariant.attention``."""
        out, first = torch.empty_like(query), 0
        for group in self.groups:
            num_rows, num_tokens = len(group.pages), group.tokens.stop - group.tokens.start
            block = torch.arange(num_tokens, device=query.device) if group.row_index is None else group.row_index
            counts = (block // group.run).bincount(minlength=num_rows).tolist()
            for pages, count in zip(group.pages, counts, strict=True):
                start, tokens = int(self.position_ids[first]), slice(first, first := first + count)
                keys, values = (x[pages].flatten(0, 1)[: start + count] for x in (keys_PSGD, values_PSGD))
                out[tokens] = attend_run(query[tokens], keys, values, start, scale)[0]
        return out


def attend_group(group: RowGroup, query: Tensor, keys_PSGD: Tensor, values_PSGD: Tensor, scale: float) -> Tensor:
    """Output of the group's tokens over keys and values in pages; a value may have another size than a key."""
    num_rows, kv_heads = group.pages.shape[0], keys_PSGD.shape[2]
    shared, head_size = query.shape[1] // kv_heads, query.shape[2]
    keys_BTGD = keys_PSGD[group.pages].flatten(1, 2)[:, : group.end]
    values_BTGD = values_PSGD[group.pages].flatten(1, 2)[:, : group.end]
    padded = query
    if group.row_index is not None:
        padded = query.new_zeros(num_rows * group.run, *query.shape[1:])
        padded[group.row_index] = query
    query_BRGJD = padded.view(num_rows, group.run, kv_heads, shared, head_size)
    visible = group.visible
    if visible is not None and group.run > 1 and shared > 1:
        visible = visible.repeat_interleave(shared, dim=2)
    out = F.scaled_dot_product_attention(
        query_BRGJD.transpose(1, 2).flatten(2, 3),
        keys_BTGD.transpose(1, 2),
        values_BTGD.transpose(1, 2),
        attn_mask=visible,
        scale=scale,
    )
    out = out.view(num_rows, kv_heads, group.run, shared, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return out if group.row_index is None else out[group.row_index]


def append_context(
    cache: PagedCache, starts: np.ndarray, counts: np.ndarray, tables: Sequence[np.ndarray]
) -> tuple[DecodeContext, np.ndarray]:
    """The context of a pass that appends ``counts[i] >= 1`` tokens to row i, which holds ``starts[i]`` positions.

    Args:
        starts, counts: int64 [rows], on the host, so that the shape of a pass is known without waiting for a device.
        tables: each row's page table, int [W_i], large enough for ``starts[i] + counts[i]`` positions.

    Returns:
        The context, and the order of the rows, int64 [rows]: the pass consists of all tokens of row ``order[0]``, then
        all of row ``order[1]``, and so on.
    """
    grouped = group_rows(starts, counts)
    order = np.concatenate(grouped)
    row_counts = counts[order]
    first_of_row = np.cumsum(row_counts) - row_counts
    column = np.arange(row_counts.sum()) - np.repeat(first_of_row, row_counts)
    positions = np.repeat(starts[order], row_counts) + column
    page_indices = np.split(positions // cache.page_size, first_of_row[1:])
    page = np.concatenate([tables[row][indices] for row, indices in zip(order, page_indices, strict=True)])
    arrays: list[np.ndarray] = [positions, page * cache.page_size + positions % cache.page_size]
    for rows in grouped:
        arrays += _group_arrays(rows, starts, counts, tables, cache.page_size)
    on_device = iter(upload(arrays, cache.device))
    position_ids, slots = next(on_device), next(on_device)
    groups, first = [], 0
    for rows in grouped:
        pages, query_positions, row_index = next(on_device), next(on_device), next(on_device)
        run, ends = int(counts[rows].max()), starts[rows] + counts[rows]
        last, end = first + int(counts[rows].sum()), int(ends.max())
        visible = None
        if run > 1 or int(ends.min()) < end:
            visible = torch.arange(end, device=cache.device) <= query_positions.view(len(rows), 1, run, 1)
        is_padded = last - first < len(rows) * run
        pages = pages.view(len(rows), -1)
        groups.append(RowGroup(slice(first, last), pages, row_index if is_padded else None, run, end, visible))
        first = last
    return DecodeContext(position_ids=position_ids, cache=cache, slots=slots, groups=groups), order


def group_rows(starts: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Rows divided into groups of similar runs and lengths, int64 indices, longest runs first."""
    ends = starts + counts
    order = np.lexsort((-ends, -counts))
    groups: list[list[int]] = []
    run = end = useful = 0
    for row, count, row_end in zip(order.tolist(), counts[order].tolist(), ends[order].tolist(), strict=True):
        wider, pairs = max(end, row_end), useful + count * row_end
        if groups and (len(groups[-1]) + 1) * run * wider - pairs <= _PADDED_PAIRS:
            groups[-1].append(row)
            end, useful = wider, pairs
        else:
            groups.append([row])
            run, end, useful = count, row_end, count * row_end
    return [np.array(group, dtype=np.int64) for group in groups]


def _group_arrays(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tables: Sequence[np.ndarray], page_size: int
) -> list[np.ndarray]:
    """Page tables [B, W], last position that each query of the padded block sees [B, R], places of the tokens."""
    run, width = int(counts[rows].max()), -(-int((starts[rows] + counts[rows]).max()) // page_size)
    pages = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows.tolist()):
        table = tables[row][:width]
        pages[i, : len(table)] = table
    columns = np.arange(run)
    # A padding query sees the same keys as a later token of the row would; its output is never read.
    query_positions = starts[rows, None] + columns
    row_index = np.flatnonzero((columns < counts[rows, None]).ravel())
    return [pages, query_positions, row_index]
