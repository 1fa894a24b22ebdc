"""Logprobs and entropies over a divided vocabulary against the op of one rank: unequal parts, one of them empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dta_kernels.linear_logprobs import linear_logprobs
from dta_kernels.parallel_linear_logprobs import parallel_linear_logprobs
from mesh_worker import run_on_ranks
from test_linear_logprobs import chunks_of, random_case

# First token of each rank's part of the 41 tokens: 20, 21 and none.
BOUNDS = [0, 20, 41, 41]
CASES = [(dtype, chunk_rows) for dtype in (torch.float64, torch.float32, torch.bfloat16) for chunk_rows in (4, 100)]
TEMPERATURE = 0.6


def _inputs(dtype: torch.dtype, chunk_rows: int) -> tuple:
    hidden, weight, edge_row, target = random_case(7, dtype)
    # Rows whose largest logit is far above the others', on one rank or another.
    hidden = (hidden.detach() * torch.linspace(0.1, 30, len(hidden)).to(dtype)[:, None]).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    gradients = tuple(torch.randn(n, generator=generator).to(dtype) for n in (len(target), len(hidden)))
    return hidden, weight, edge_row, target, chunks_of(len(hidden), edge_row, chunk_rows), gradients


def _on_rank(rank: int, cases: list) -> list[dict[str, Any]]:
    group = torch.distributed.group.WORLD
    found = []
    for case in cases:
        hidden, weight, edge_row, target, chunks, gradients = _inputs(*case)
        part = weight.detach()[BOUNDS[rank] : BOUNDS[rank + 1]].requires_grad_()
        outputs = parallel_linear_logprobs(hidden, part, edge_row, target, chunks, TEMPERATURE, BOUNDS[rank], group)
        result = {"outputs": [output.detach() for output in outputs]}
        for name, chosen in (("both", [0, 1]), ("logprobs", [0]), ("entropy", [1])):
            upstream = [gradients[i].to(outputs[i].dtype) for i in chosen]
            grad_hidden, grad_weight = torch.autograd.grad(
                [outputs[i] for i in chosen], (hidden, part), upstream, retain_graph=True
            )
            torch.distributed.all_reduce(grad_hidden)
            result[name] = (grad_hidden, grad_weight)
        no_rows = hidden[:0]
        empty = parallel_linear_logprobs(no_rows, part, edge_row[:0], target[:0], [], TEMPERATURE, BOUNDS[rank], group)
        result["empty"] = [tuple(output.shape) for output in empty]
        found.append(result)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[list[dict[str, Any]]]:
    return run_on_ranks(_on_rank, CASES, 3, tmp_path_factory.mktemp("logprobs"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{str(dtype)[6:]}-{rows}" for dtype, rows in CASES])
def test_equals_one_rank(results, index):
    dtype, _ = CASES[index]
    ranks = [rank[index] for rank in results]
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank["outputs"], ranks[0]["outputs"], strict=True))
        assert rank["empty"] == [(0,), (0,)]
    hidden, weight, edge_row, target, chunks, gradients = _inputs(*CASES[index])
    expected = linear_logprobs(hidden, weight, edge_row, target, chunks, TEMPERATURE)
    assert ranks[0]["outputs"][0].dtype == expected[0].dtype
    # Logits of some hundreds, whose float32 roundings are 1e-5 of a probability.
    rtol, atol = {torch.float64: (1e-12, 1e-13), torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 2e-2)}[dtype]
    exact = (1e-12, 1e-13) if dtype == torch.float64 else (1e-5, 2e-5)
    for actual, wanted in zip(ranks[0]["outputs"], expected, strict=True):
        torch.testing.assert_close(actual, wanted.detach(), rtol=exact[0], atol=exact[1])
    for name, chosen in (("both", [0, 1]), ("logprobs", [0]), ("entropy", [1])):
        upstream = [gradients[i].to(expected[i].dtype) for i in chosen]
        wanted = torch.autograd.grad([expected[i] for i in chosen], (hidden, weight), upstream, retain_graph=True)
        scale = [float(gradient.abs().max()) for gradient in wanted]
        torch.testing.assert_close(ranks[0][name][0], wanted[0], rtol=rtol, atol=atol * scale[0])
        whole = torch.cat([rank[name][1] for rank in ranks])
        torch.testing.assert_close(whole, wanted[1], rtol=rtol, atol=atol * scale[1])
