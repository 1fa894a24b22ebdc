"""Logprobs and entropies over a divided vocabulary against the op of one rank: unequal parts, one of them empty."""

from typing import Any

import pytest
import torch

from dta_kernels.logprobs.linear import VocabularyShard, linear_logprobs
from linear_logprobs_cases import chunks_of, random_case
from mesh_worker import run_on_ranks

# First token of each rank's part of the 41 tokens: 20, 21 and none.
BOUNDS = [0, 20, 41, 41]
# Dtype, and whether the op runs on its kernels (in Triton's interpreter).
CASES = [(torch.float64, False), (torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
CHUNK_ROWS = 4
TEMPERATURE = 0.6


def _inputs(dtype: torch.dtype) -> tuple:
    hidden, weight, edge_row, target = random_case(7, dtype)
    # Rows whose largest logit is far above the others', on one rank or another.
    hidden = (hidden.detach() * torch.linspace(0.1, 30, len(hidden)).to(dtype)[:, None]).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    gradients = tuple(torch.randn(n, generator=generator).to(dtype) for n in (len(target), len(hidden)))
    return hidden, weight, edge_row, target, chunks_of(len(hidden), edge_row, CHUNK_ROWS), gradients


def _on_rank(rank: int, cases: list) -> list[dict[str, Any]]:
    shard = VocabularyShard(BOUNDS[rank], torch.distributed.group.WORLD)
    results = []
    for dtype, fused in cases:
        hidden, weight, edge_row, target, chunks, gradients = _inputs(dtype)
        part = weight.detach()[BOUNDS[rank] : BOUNDS[rank + 1]].requires_grad_()
        outputs = linear_logprobs(hidden, part, edge_row, target, chunks, TEMPERATURE, fused, shard=shard)
        result = {"outputs": [output.detach() for output in outputs]}
        for name, chosen in (("both", [0, 1]), ("logprobs", [0]), ("entropy", [1])):
            upstream = [gradients[i].to(outputs[i].dtype) for i in chosen]
            grad_hidden, grad_weight = torch.autograd.grad(
                [outputs[i] for i in chosen], (hidden, part), upstream, retain_graph=True
            )
            torch.distributed.all_reduce(grad_hidden)
            result[name] = (grad_hidden, grad_weight)
        no_rows = hidden[:0]
        empty = linear_logprobs(no_rows, part, edge_row[:0], target[:0], [], TEMPERATURE, shard=shard)
        result["empty"] = [tuple(output.shape) for output in empty]
        results.append(result)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[list[dict[str, Any]]]:
    return run_on_ranks(_on_rank, CASES, 3, tmp_path_factory.mktemp("logprobs"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=["float64", "float32", "bfloat16", "kernels"])
def test_equals_one_rank(results, index):
    dtype, fused = CASES[index]
    ranks = [rank[index] for rank in results]
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank["outputs"], ranks[0]["outputs"], strict=True))
        assert rank["empty"] == [(0,), (0,)]
    one_rank, truth = (_on_one_rank(dtype, computed_in) for computed_in in (dtype, torch.float64))
    for name, wanted in truth.items():
        gathered = ranks[0][name] if name == "outputs" else (ranks[0][name][0], torch.cat([r[name][1] for r in ranks]))
        for actual, same_dtype, exact in zip(gathered, one_rank[name], wanted, strict=True):
            assert actual.dtype == same_dtype.dtype
            error, error_of_one = (float((x.double() - exact).abs().max()) for x in (actual, same_dtype))
            # Roundings of its own, but none worse than one rank's; kernels add in other orders.
            rounding = (1e-6 if fused else 1e-13) * float(exact.abs().max())
            assert error <= 4 * error_of_one + rounding, (name, error, error_of_one)


def _on_one_rank(dtype: torch.dtype, computed_in: torch.dtype) -> dict[str, tuple]:
    hidden, weight, edge_row, target, chunks, gradients = _inputs(dtype)
    hidden, weight = (tensor.detach().to(computed_in).requires_grad_() for tensor in (hidden, weight))
    outputs = linear_logprobs(hidden, weight, edge_row, target, chunks, TEMPERATURE)
    result = {"outputs": tuple(output.detach() for output in outputs)}
    for name, chosen in (("both", [0, 1]), ("logprobs", [0]), ("entropy", [1])):
        upstream = [gradients[i].to(outputs[i].dtype) for i in chosen]
        result[name] = torch.autograd.grad([outputs[i] for i in chosen], (hidden, weight), upstream, retain_graph=True)
    return result
