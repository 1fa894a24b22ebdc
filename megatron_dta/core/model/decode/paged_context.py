"""Decodes on GPUs with kernels that read the cache's pages in place (``dta_kernels.paged_attention.launch``).

It replaces ``decode_context`` on GPUs: one pass takes a few launches for rows of any lengths. Rows with few new tokens
(decoding, drafts) come first, their keys divided among programs where the rows alone would not fill a GPU; runs of
prompt tokens follow.

``StaticPass`` is a pass over tensors with fixed addresses, for CUDA graphs. Its fields are filled before each run, and
its unused rows have no effect (no slot, no tile).

Legend: n new tokens of the pass, T tiles, L layers of the rank, S positions of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from dta_kernels.invariant.attention import invariant_config
from dta_kernels.invariant.products import is_batch_invariant
from dta_kernels.paged_attention.launch import (
    LONGEST_SPLIT_RUN,
    TILE_FIELDS,
    PagedConfig,
    Parts,
    paged_attention,
    paged_config,
    tiles_of,
    write_pages,
)
from dta_kernels.upload import upload
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.decode.paged_cache import PagedCache

if TYPE_CHECKING:
    from dta_kernels.layers.qkv_rope import MixedQKV


@dataclass(frozen=True)
class HeadShape:
    """Numbers of heads on a rank, their size and dtype, and the size of a value if it is another one."""

    num_heads: int
    num_groups: int
    head_size: int
    dtype: torch.dtype
    value_size: int | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether kernels read the pages: they take no latents."""
        return self.value_size is None

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels of a key and of a value in the cache."""
        return self.head_size, self.head_size if self.value_size is None else self.value_size

    def config(self, run: int, tiles: int = 1) -> PagedConfig:
        """The kernels' settings for ``tiles`` of runs of up to ``run`` tokens."""
        shape = self.num_heads // self.num_groups, self.head_size, self.dtype
        return invariant_config(*shape) if is_batch_invariant() else paged_config(*shape, run, tiles * self.num_groups)

    def tile_tokens(self, run: int) -> int:
        """Maximum number of tokens of a tile for runs of up to ``run`` tokens."""
        if not self.has_kernels:
            return 1
        return self.config(run).tokens_of(self.num_heads // self.num_groups)


@dataclass
class PagedContext(AttentionContext):
    """One decoding pass.

    Attributes:
        addresses: int64 [L, 2], see ``PagedCache.addresses``.
        layer_rows: row of ``addresses`` by layer number.
        page_size: S.
        num_groups: key/value heads on this rank.
        slots: int64 [n], slots of the tokens' K and V, negative for none.
        tables: int64, the page tables, concatenated.
        launches: tiles (int64 [T, 4]) and their settings.
        decodes: whether every row of the pass has one token.
        direct_until: number of the last layer that ``decode_layer`` computes in this pass, with all layers before it;
            None if modules compute all layers.
        carried: the branch that the previous layer has not added to its output, [n, 1, hidden size], or its terms
            [S, n, 1, hidden size] (``dta_kernels.layers.few_rows``).
    """

    reads_pages: ClassVar[bool] = True

    addresses: Tensor | None = None
    layer_rows: dict[int, int] = field(default_factory=dict)
    page_size: int = 0
    num_groups: int = 0
    slots: Tensor | None = None
    tables: Tensor | None = None
    launches: list[tuple[Tensor, PagedConfig]] = field(default_factory=list)
    decodes: bool = False
    direct_until: int | None = None
    carried: Tensor | None = None
    # Buffers that the layers use one after the other.
    _parts: Parts = field(default_factory=Parts)
    _out: Tensor | None = None

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # All tokens are written first, because a row may read tokens that another row of this pass has just computed.
        write_pages(key, value, self.pages_of(layer_number), self.slots)
        return self.attend_written(layer_number, query, scale)

    def pages_of(self, layer_number: int) -> Tensor:
        """Where the pages of a layer's K and V begin: int64 [2] on the device."""
        return self.addresses[self.layer_rows[layer_number]]

    def attend_written(self, layer_number: int, query: Tensor, scale: float) -> Tensor:
        """``attend`` after K and V of all tokens have been written."""
        addresses, out = self.pages_of(layer_number), self._out_of(query.shape, query)
        for tiles, config in self.launches:
            paged_attention(
                query, out, addresses, self.num_groups, self.page_size, tiles, self.tables, scale, config, self._parts
            )
        return out

    def attend_mixed(self, layer_number: int, rows: MixedQKV, like: Tensor, scale: float) -> Tensor:
        """Attention [n, H, D], in the dtype of ``like``, of ``rows`` whose K and V are written, too; in a pass that
        ``decodes``."""
        from dta_kernels.paged_attention.mixed_rows import attend_mixed

        (tiles, config), (G, P, D) = self.launches[0], rows.layout
        out = self._out_of((len(self.slots), G * P, D), like)
        addresses = self.pages_of(layer_number)
        attend_mixed(
            rows, out, addresses, self.slots, self.page_size, tiles, self.tables, scale, config, self._parts
        )  # fmt: skip
        return out

    def _out_of(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self._out is None:
            # Zeros, so that rows without a tile stay zero and no NaN reaches later layers.
            self._out = like.new_zeros(shape)
        return self._out


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass on the host: row i appends ``counts[i]`` tokens after ``starts[i]`` positions.

    Attributes:
        positions, slots: int64 [n].
        tables: the needed parts of the rows' page tables, concatenated.
        table_begins: int64 [rows].
    """

    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    table_begins: np.ndarray


def pass_rows(starts: np.ndarray, counts: np.ndarray, tables: Sequence[np.ndarray], page_size: int) -> PassRows:
    """``tables``: each row's page table, large enough for ``starts[i] + counts[i]`` positions."""
    widths = -(-(starts + counts) // page_size)
    flat = np.concatenate([table[:width] for table, width in zip(tables, widths.tolist(), strict=True)])
    begins, ends = widths.cumsum() - widths, counts.cumsum()
    positions = np.arange(ends[-1]) + (starts - ends + counts).repeat(counts)
    pages = flat[begins.repeat(counts) + positions // page_size]
    return PassRows(positions, pages * page_size + positions % page_size, flat, begins)


def paged_context(
    cache: PagedCache, starts: np.ndarray, counts: np.ndarray, tables: Sequence[np.ndarray], shape: HeadShape
) -> tuple[PagedContext, np.ndarray]:
    """The context of a pass, and the order of its rows, as in ``decode_context.append_context``."""
    order = np.argsort(counts > LONGEST_SPLIT_RUN, kind="stable")
    starts, counts = starts[order], counts[order]
    rows = pass_rows(starts, counts, [tables[i] for i in order], cache.page_size)
    arrays, configs = [rows.positions, rows.slots, rows.tables], []
    short = int((counts <= LONGEST_SPLIT_RUN).sum())
    for part in (slice(0, short), slice(short, None)):
        if len(counts[part]):
            run = int(counts[part].max())
            configs.append(shape.config(run, len(counts[part])))
            first = int(counts[: part.start].sum())
            tile_tokens = shape.tile_tokens(run)
            arrays.append(tiles_of(starts[part], counts[part], rows.table_begins[part], first, tile_tokens))
    positions, slots, flat, *tiles = upload(arrays, cache.device)
    launches = [(t.view(-1, TILE_FIELDS), config) for t, config in zip(tiles, configs, strict=True)]
    context = PagedContext(
        position_ids=positions, addresses=cache.addresses, layer_rows=cache.layer_rows, page_size=cache.page_size,
        num_groups=shape.num_groups, slots=slots, tables=flat, launches=launches, decodes=bool((counts == 1).all()),
    )  # fmt: skip
    return context, order


def static_tiles(starts: np.ndarray, counts: np.ndarray, rows: PassRows, tokens: int) -> np.ndarray:
    """Tiles of at most ``tokens`` tokens of all ``rows``, int64 [T, 4]."""
    return tiles_of(starts, counts, rows.table_begins, 0, tokens)


class StaticPass:
    """Inputs of a pass of at most ``num_tokens`` tokens in at most as many tiles, at fixed addresses.

    Attributes:
        input_ids: int64 [1, num_tokens]; in ``inputs`` behind the ``words``. ``empty``: these without any token.
        noise: float64 [num_tokens].
        context: attends with the values that the fields hold when it runs.
        words: int64, the output of ``pack``: positions, slots, noise, slots of states, and tiles.
        state_slots: int64 [num_tokens], -1 for tokens that change no state.
    """

    def __init__(
        self,
        num_tokens: int,
        run: int,
        shape: HeadShape,
        page_size: int,
        tables: Tensor,
        addresses: Tensor,
        layer_rows: dict[int, int],
    ) -> None:
        self._allocate(num_tokens, tables.device)
        n = num_tokens
        self.context = PagedContext(
            position_ids=self.words[:n], addresses=addresses, layer_rows=layer_rows, page_size=page_size,
            num_groups=shape.num_groups, slots=self.words[n : 2 * n], tables=tables,
            launches=[(self.words[4 * n :].view(-1, TILE_FIELDS), shape.config(run, n))], decodes=run == 1,
        )  # fmt: skip

    def _allocate(self, n: int, device: torch.device) -> None:
        self.num_tokens = n
        # One behind the other, for a copy of both; on the host without any token.
        self.empty = np.append(self.empty_words(1), np.zeros(n, np.int64))
        self.inputs = torch.from_numpy(self.empty.copy()).to(device)
        self.words, self.input_ids = self.inputs[:-n], self.inputs[-n:].view(1, n)
        self.noise = self.words[2 * n : 3 * n].view(torch.float64)
        self.state_slots = self.words[3 * n : 4 * n]

    def empty_words(self, steps: int) -> np.ndarray:
        """``words`` of ``steps`` passes on the host, without any token: int64 [steps, words]."""
        n = self.num_tokens
        words = np.zeros((steps, (4 + TILE_FIELDS) * n), np.int64)
        words[:, n : 2 * n] = words[:, 3 * n : 4 * n] = -1
        return words

    def pack(
        self,
        words: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        noise: np.ndarray,
        tiles: np.ndarray,
        state_slots: np.ndarray | None = None,
    ) -> None:
        """Fill ``words`` [steps, words] with positions, slots, noise and slots of states [steps, n] and tiles
        [steps, T, 4]."""
        n, tokens = self.num_tokens, positions.shape[1]
        words[:, :tokens] = positions
        words[:, n : n + tokens] = slots
        words[:, 2 * n : 2 * n + tokens] = noise.view(np.int64)
        if state_slots is not None:
            words[:, 3 * n : 3 * n + tokens] = state_slots
        words[:, 4 * n : 4 * n + TILE_FIELDS * tiles.shape[1]] = tiles.reshape(len(words), -1)
