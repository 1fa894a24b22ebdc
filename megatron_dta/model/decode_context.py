"""Decoding with a K/V cache: one pass appends tokens to rows of a batch, and they attend to all that their row holds.

One kind of pass covers prefill (a chunk of each prompt), decoding (one token a row) and whatever appends a few tokens
at once. Nothing here is differentiated: training runs ``segment_context``. Attention is PyTorch's
``scaled_dot_product_attention`` with a mask by length; queries of a pass are padded to its longest run, which for
decoding is 1.

Legend: L layers, B rows (sequences), T cached positions, R longest run of new tokens, n new tokens of the pass, G
key/value heads on this rank, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dta.model.attention_context import AttentionContext

# Capacity grows by a quarter of what is needed, at least by this: a long response is then copied a few times, not at
# every token, and a short one does not reserve much that it never uses.
_LEAST_GROWTH = 16


class DecodeCache:
    """K and V of ``B`` sequences, every layer. Row b holds positions ``0 .. lengths[b] - 1``; the rest is undefined.

    Attributes:
        keys, values: by 1-based layer number, the rank's layers, [B, T, G, D] in the model's dtype.
        capacity: positions that every row has room for (T).
        lengths: int64 [B] on the host: the shape of a pass must be known without waiting for a device.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        num_rows: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_rows, 0, num_kv_heads, head_size)
        self.keys = {number: torch.empty(shape, dtype=dtype, device=device) for number in layer_numbers}
        self.values = {number: torch.empty(shape, dtype=dtype, device=device) for number in layer_numbers}
        self.capacity, self.device = 0, torch.device(device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64)

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` in every row, keeping what is there."""
        if positions > self.capacity:
            self.capacity = positions + max(_LEAST_GROWTH, positions // 4)
            for of_layers in (self.keys, self.values):
                for number, tensor in of_layers.items():
                    of_layers[number] = _with_capacity(tensor, self.capacity)

    def select_rows(self, rows: Tensor) -> DecodeCache:
        """A cache whose row i copies row ``rows[i]`` (int64, host): spreads prompts to samples, drops finished ones."""
        chosen = object.__new__(DecodeCache)
        device_rows = rows.to(self.device)
        chosen.keys = {number: keys.index_select(0, device_rows) for number, keys in self.keys.items()}
        chosen.values = {number: values.index_select(0, device_rows) for number, values in self.values.items()}
        chosen.capacity, chosen.device = self.capacity, self.device
        chosen.lengths = self.lengths[rows]
        return chosen


def _with_capacity(tensor_BTGD: Tensor, capacity: int) -> Tensor:
    # Zeros, not uninitialized memory: a NaN under a masked key would still reach the output as 0 x NaN.
    larger = tensor_BTGD.new_zeros(tensor_BTGD.shape[0], capacity, *tensor_BTGD.shape[2:])
    larger[:, : tensor_BTGD.shape[1]] = tensor_BTGD
    return larger


@dataclass
class DecodeContext(AttentionContext):
    """One pass that appends ``counts[i]`` tokens to row ``rows[i]`` of the cache; made by ``append_context``.

    Attributes:
        cache: where K and V of the new tokens go.
        rows: int64 [number of rows in the pass] or None for all rows of the cache in order.
        token_row, token_column: int64 [n], place of each new token in the padded block [rows, R].
        run: R, the longest run of new tokens.
        end: cached positions that some query sees.
        visible: bool [rows, 1, R, end], or None where every query sees all ``end`` positions.
    """

    cache: DecodeCache | None = None
    rows: Tensor | None = None
    token_row: Tensor | None = None
    token_column: Tensor | None = None
    run: int = 1
    end: int = 0
    visible: Tensor | None = None

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.keys[layer_number], self.cache.values[layer_number]
        cache_row = self.token_row if self.rows is None else self.rows[self.token_row]
        keys[cache_row, self.position_ids] = key
        values[cache_row, self.position_ids] = value
        keys_BTGD, values_BTGD = keys[:, : self.end], values[:, : self.end]
        if self.rows is not None:
            keys_BTGD, values_BTGD = keys_BTGD[self.rows], values_BTGD[self.rows]
        num_rows = keys_BTGD.shape[0]
        if query.shape[0] == num_rows * self.run:
            query_BRHD = query.view(num_rows, self.run, *query.shape[1:])
        else:
            query_BRHD = query.new_zeros(num_rows, self.run, *query.shape[1:])
            query_BRHD[self.token_row, self.token_column] = query
        out_BHRD = F.scaled_dot_product_attention(
            query_BRHD.transpose(1, 2),
            keys_BTGD.transpose(1, 2),
            values_BTGD.transpose(1, 2),
            attn_mask=self.visible,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_BHRD.transpose(1, 2)[self.token_row, self.token_column]


def append_context(cache: DecodeCache, counts: Tensor, rows: Tensor | None = None) -> DecodeContext:
    """The context of a pass that appends ``counts[i] >= 1`` tokens to row ``rows[i]`` (all rows if None), row by row.

    The pass's tokens are in row order: all of the first row's, then the second's. ``cache.lengths`` is advanced here,
    so the cache is complete once the pass has run. Both arguments are int64 tensors on the host.
    """
    device = cache.device
    starts = cache.lengths if rows is None else cache.lengths[rows]
    ends = starts + counts
    run, end = int(counts.max()), int(ends.max())
    cache.reserve(end)
    if rows is None:
        cache.lengths = ends
    else:
        cache.lengths[rows] = ends
    token_row = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    first_of_row = torch.cumsum(counts, 0) - counts
    token_column = torch.arange(token_row.numel()) - first_of_row[token_row]
    # Queries of padding (column >= count) see what the row's last token would: their output is never read.
    query_position = starts[:, None] + torch.arange(run)
    visible = torch.arange(end) <= query_position[:, None, :, None]
    return DecodeContext(
        position_ids=(starts[token_row] + token_column).to(device),
        cache=cache,
        rows=None if rows is None else rows.to(device),
        token_row=token_row.to(device),
        token_column=token_column.to(device),
        run=run,
        end=end,
        visible=None if bool(visible.all()) else visible.to(device),
    )
