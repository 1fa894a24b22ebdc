"""Stores K and V of many sequences for decoding, in pages of a fixed number of positions.

The page table of a sequence lists the pages of its positions. A page can be in several tables, so sequences with a
common prefix store it once. Pages are assigned on the host (``in_process.pages``); this module holds the tensors.

Legend: P pages, S positions of a page, G key/value heads on this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dta_kernels.paged_attention.launch import copy_pages
from dta_kernels.upload import upload


class PagedCache:
    """Pages of every layer of the rank.

    Attributes:
        keys, values: by 1-based layer number, [P, S, G, D] in the model's dtype; of latents, which have no values,
            with a spare page behind the others.
        page_size: S.
        num_pages: P.
        addresses: int64 [layers, 2] on the device, where each layer's pages of keys and of values begin, for kernels
            that read the pages in place; ``grow`` changes the addresses.
        layer_rows: the row of ``addresses`` by layer number.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        page_size: int,
        num_kv_heads: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys, self.values = (
            {n: torch.empty(0, page_size, num_kv_heads, size, dtype=dtype, device=device) for n in layer_numbers}
            for size in sizes
        )
        self.page_size, self.num_pages, self.device = page_size, 0, torch.device(device)
        self._spare = int(sizes[1] == 0)
        self.layer_rows = {number: row for row, number in enumerate(layer_numbers)}
        self.addresses = torch.zeros(len(self.layer_rows), 2, dtype=torch.int64, device=self.device)

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, num_kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype
    ) -> int:
        """Memory of one page in all layers of the rank; ``sizes`` are those of a key and of a value."""
        return num_layers * page_size * num_kv_heads * sum(sizes) * dtype.itemsize

    def grow(self, num_pages: int) -> None:
        """Enlarge the cache to ``num_pages`` and keep its contents; one layer's tensor is copied at a time."""
        if num_pages > self.num_pages:
            self.num_pages = num_pages
            for of_layers in (self.keys, self.values):
                for number, tensor in of_layers.items():
                    # Zeros instead of uninitialized memory: a masked NaN would still reach the output as 0 x NaN.
                    larger = tensor.new_zeros(num_pages + self._spare, *tensor.shape[1:])
                    larger[: tensor.shape[0]] = tensor
                    of_layers[number] = larger
            pairs = [[self.keys[number].data_ptr(), self.values[number].data_ptr()] for number in self.layer_rows]
            self.addresses = upload([np.array(pairs, np.int64)], self.device)[0].view(-1, 2)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, all at once: the source of one copy may be the target of another."""
        if len(sources) == 0:
            return
        # Not from pageable memory, for which the host may wait until the passes before have run.
        sources_on_device, targets_on_device = upload([np.array(sources), np.array(targets)], self.device)
        # The kernel copies as much of values as of keys; pages of latents have no values.
        if self.device.type == "cuda" and self.keys and next(iter(self.values.values())).numel():
            # Two launches in total instead of two for K and V of each layer: these copies run between short passes.
            page = next(iter(self.keys.values()))[0]
            copy_pages(sources_on_device, targets_on_device, self.addresses, page.numel(), page.dtype)
            return
        for of_layers in (self.keys, self.values):
            for tensor in of_layers.values():
                tensor[targets_on_device] = tensor[sources_on_device]

    def write(self, layer_number: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write ``key`` and ``value`` [n, G, D] to slots (page x S + offset, int64 [n]; -1 is in the spare page)."""
        self.keys[layer_number].flatten(0, 1)[slots] = key
        self.values[layer_number].flatten(0, 1)[slots] = value
