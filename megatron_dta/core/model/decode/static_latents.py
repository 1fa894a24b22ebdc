"""A pass over pages of latents at fixed addresses, in plain PyTorch, for CUDA graphs.

Kernels read pages at addresses in memory; PyTorch's ops are captured with those of the tensors themselves. Such a pass
therefore belongs to one size of the cache, and reads the same number of pages for each row. Every row has one token;
what lies beyond a row's own pages is masked. Tokens without a slot write to the cache's spare page.

Legend: n tokens of the pass, W pages of a row, S positions of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dta_kernels.paged_attention.launch import TILE_FIELDS
from megatron_dta.core.model.decode.decode_context import DecodeContext, RowGroup
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.decode.paged_context import StaticPass

# Latents that are gathered at once; those of DeepSeek V3 take 0.3 GB.
_MOST_POSITIONS = 1 << 18


class StaticLatents(StaticPass):
    """The inputs are those of ``StaticPass``; a token is a tile.

    Args:
        cache: that of the next runs; a weak reference will do.
        tables: int64, the page tables, concatenated.
        width: W.
    """

    def __init__(self, num_tokens: int, cache: PagedCache, tables: Tensor, width: int) -> None:
        self._allocate(num_tokens, tables.device)
        self._cache, self._tables, self._width = cache, tables, width

    @property
    def context(self) -> DecodeContext:
        """Attends with the values that ``words`` holds, of which it is made anew in every run."""
        n, size = self.num_tokens, self._cache.page_size
        positions, slots = self.words[:n], self.words[n : 2 * n]
        begins = self.words[4 * n :].view(-1, TILE_FIELDS)[:, 3]
        columns = torch.arange(self._width, device=begins.device)
        pages = self._tables[(begins.unsqueeze(1) + columns).clamp_(max=len(self._tables) - 1)]
        # Entries behind a row's table are of other rows, or of a cache that was larger.
        pages = pages.masked_fill(columns * size > positions.unsqueeze(1), 0)
        keys = torch.arange(self._width * size, device=begins.device)
        visible = (keys <= positions.unsqueeze(1)).view(n, 1, 1, -1)
        step = max(1, _MOST_POSITIONS // len(keys))
        parts = [slice(begin, min(begin + step, n)) for begin in range(0, n, step)]
        groups = [RowGroup(part, pages[part], None, 1, len(keys), visible[part]) for part in parts]
        return DecodeContext(position_ids=positions, cache=self._cache, slots=slots, groups=groups)
