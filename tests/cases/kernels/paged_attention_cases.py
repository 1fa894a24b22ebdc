"""Random passes over a paged K/V cache, for the interpreter and for a GPU: poisoned memory, shuffled shared pages."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dta_kernels.paged_attention.launch import (
    PagedConfig,
    Parts,
    paged_attention,
    paged_attention_reference,
    tiles_of,
    write_pages,
    write_pages_reference,
)

NAN = float("nan")


@dataclass
class PagedCase:
    """Pages that hold what the rows have, NaN elsewhere; new tokens with their K and V."""

    keys: Tensor
    values: Tensor
    query: Tensor
    new_key: Tensor
    new_value: Tensor
    slots: Tensor
    tables: Tensor
    starts: np.ndarray
    counts: np.ndarray
    table_begins: np.ndarray
    scale: float

    @classmethod
    def random(
        cls, generator: np.random.Generator, starts: list[int], counts: list[int], shape: tuple[int, int, int],
        dtype: torch.dtype, device: torch.device, page_size: int = 16, strided: bool = True,
    ) -> "PagedCase":  # fmt: skip
        """``shape``: query heads, key/value heads, head size."""
        H, G, D = shape
        starts, counts = np.array(starts, np.int64), np.array(counts, np.int64)
        widths = -(-(starts + counts) // page_size)
        num_pages = int(widths.sum()) + 3
        order = generator.permutation(num_pages)
        begins = np.cumsum(widths) - widths
        n = int(counts.sum())

        def draw(*size: int) -> Tensor:
            return torch.from_numpy(generator.standard_normal(size)).to(device, dtype)

        keys, values = (torch.full((num_pages, page_size, G, D), NAN, dtype=dtype, device=device) for _ in range(2))
        positions, slots = [], []
        for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            table = order[begins[i] : begins[i] + widths[i]]
            held = np.arange(start)
            index = torch.from_numpy(table[held // page_size] * page_size + held % page_size).to(device)
            keys.flatten(0, 1)[index], values.flatten(0, 1)[index] = draw(start, G, D), draw(start, G, D)
            new = np.arange(start, start + count)
            positions.append(new)
            slots.append(table[new // page_size] * page_size + new % page_size)
        # As Megatron gives them: parts of one tensor.
        mixed = draw(n, G, (H // G + 2) * D) if strided else None
        new_key, new_value = draw(n, G, D), draw(n, G, D)
        if strided:
            new_value = mixed[:, :, -D:]
        query = draw(n, H, 2 * D)[:, :, :D] if strided else draw(n, H, D)
        slots_on_device = torch.from_numpy(np.concatenate(slots)).to(device)
        tables = torch.from_numpy(order[: int(widths.sum())].astype(np.int64)).to(device)
        case = cls(keys, values, query, new_key, new_value, slots_on_device, tables, starts, counts, begins, D**-0.5)
        return case

    @property
    def addresses(self) -> Tensor:
        return torch.tensor([self.keys.data_ptr(), self.values.data_ptr()], device=self.keys.device)

    def tiles(self, tokens: int, padding: int = 0) -> Tensor:
        tiles = tiles_of(self.starts, self.counts, self.table_begins, 0, tokens)
        tiles = np.concatenate([tiles, np.zeros((padding, 4), np.int64)])
        return torch.from_numpy(tiles).to(self.keys.device)

    def run(self, config: PagedConfig, padding: int = 0) -> Tensor:
        """Write and attend with the kernels; rows of no tile stay NaN."""
        H, G = self.query.shape[1], self.keys.shape[2]
        extra = torch.full((padding,), -1, dtype=torch.int64, device=self.slots.device)
        query, key, value = (
            torch.cat([x, torch.full_like(x[:1], NAN).expand(padding, -1, -1)]) if padding else x
            for x in (self.query, self.new_key, self.new_value)
        )
        write_pages(key, value, self.addresses, torch.cat([self.slots, extra]))
        out = torch.full(query.shape, NAN, dtype=query.dtype, device=query.device)
        parts = Parts()
        for memory in parts.at_least(config, out, 0)[:2]:
            memory.fill_(NAN)  # that of the output itself if there is one part
        tiles = self.tiles(config.tokens_of(H // G), padding)
        paged_attention(
            query, out, self.addresses, G, self.keys.shape[1], tiles, self.tables, self.scale, config, parts
        )
        assert parts.arrived is None or not parts.arrived.any()
        return out

    def expected(self) -> Tensor:
        """The output of the plain reference, on a copy of the pages."""
        keys, values = self.keys.clone(), self.values.clone()
        write_pages_reference(self.new_key, self.new_value, keys, values, self.slots)
        out = torch.full(self.query.shape, NAN, dtype=self.query.dtype, device=self.query.device)
        paged_attention_reference(self.query, out, keys, values, self.tiles(10**6), self.tables, self.scale)
        return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())
