"""Random inputs of the chunked logprobs, and the sizes of chunks to try."""

import torch

from conftest import seed_all
from dta_kernels.logprobs.linear import RowChunk


def random_case(seed: int, dtype: torch.dtype):
    generator = seed_all(seed)
    rows, vocabulary, width = 23, 41, 7
    counts = generator.integers(0, 5, size=rows)
    edge_row = torch.repeat_interleave(torch.arange(rows), torch.from_numpy(counts))
    target = torch.cat([torch.randperm(vocabulary)[:count] for count in counts.tolist()])
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return hidden, weight, edge_row, target


def chunks_of(rows: int, edge_row: torch.Tensor, size: int) -> list[RowChunk]:
    bounds = [*range(0, rows, size), rows]
    edges = torch.searchsorted(edge_row, torch.tensor(bounds)).tolist()
    return [RowChunk(*bounds[i : i + 2], *edges[i : i + 2]) for i in range(len(bounds) - 1)]
