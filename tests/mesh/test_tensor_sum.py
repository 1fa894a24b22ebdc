"""Sums over a tensor group for decoding passes: here those of ``all_reduce``; see ``tests/gpu/test_gpu_tensor_decode``
for those that read peer memory."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.model.parallel import tensor_sum as module
from mesh_worker import run_on_ranks

SHAPES = [(1, 8), (7, 33), (0, 8), (64, 3)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def terms(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES for dtype in DTYPES]


def sums_on_rank(rank: int, _: Any) -> dict[str, Any]:
    from megatron_dta.core.model.parallel.mesh import destroy_parallel, initialize_parallel

    initialize_parallel(5, ParallelConfig(tensor_model_parallel_size=2))
    found = module.tensor_sum()
    assert found.reads_peers is None
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(10 + rank))
    results = {
        "sums": [found(term) for term in terms(rank)],
        "product": found.product(terms(rank)[5], weight),
        "peers": found.reads_peers,
        "is one": module.tensor_sum() is found,
    }
    destroy_parallel()
    initialize_parallel(5, ParallelConfig(tensor_model_parallel_size=2))
    return results | {"is another": module.tensor_sum() is not found}


def test_sums_over_gloo(tmp_path):
    ranks = run_on_ranks(sums_on_rank, None, 2, tmp_path / "mesh", "gloo")
    both = [terms(0), terms(1)]
    weights = [torch.randn(5, 33, generator=torch.Generator().manual_seed(10 + rank)) for rank in (0, 1)]
    product = both[0][5] @ weights[0].t() + both[1][5] @ weights[1].t()
    for rank in ranks:
        assert rank["peers"] is False
        assert rank["is one"]
        assert rank["is another"]
        assert all(torch.equal(total, one + other) for total, one, other in zip(rank["sums"], *both, strict=True))
        assert torch.equal(rank["product"], product)


def peers_on_rank(rank: int, _: Any) -> dict[str, Any]:
    """Terms of the right size and type pass through the buffer; the kernel's place is taken by a sum of gloo."""
    from megatron_dta.core.model.parallel.mesh import initialize_parallel

    calls = []

    def one_shot(own: torch.Tensor, group: Any) -> torch.Tensor:
        calls.append((own.data_ptr(), own.numel() * own.element_size()))
        total = own.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    initialize_parallel(5, ParallelConfig(tensor_model_parallel_size=2))
    buffer = torch.full((768,), 255, dtype=torch.uint8)
    with (
        mock.patch.object(module, "_meet_peers", return_value=buffer),
        mock.patch.object(module, "_one_shot", one_shot),
        torch.no_grad(),
    ):
        found = module.tensor_sum()
        sums = [found(term) for term in terms(rank)]
        weight = torch.nn.Parameter(torch.randn(8, 33, generator=torch.Generator().manual_seed(10 + rank)))
        products = [found.product(rows, weight) for rows in (terms(rank)[5], terms(rank)[5][:3])]
    return {
        "sums": sums,
        "products": products,
        "sizes": [size for _, size in calls],
        "in place": {address for address, _ in calls} == {buffer.data_ptr()},
        "peers": found.reads_peers,
    }


def test_small_terms_pass_through_the_buffer(tmp_path):
    ranks = run_on_ranks(peers_on_rank, None, 2, tmp_path / "mesh", "gloo")
    both = [terms(0), terms(1)]
    weights = [torch.randn(8, 33, generator=torch.Generator().manual_seed(10 + rank)) for rank in (0, 1)]
    product = both[0][5] @ weights[0].t() + both[1][5] @ weights[1].t()
    for rank in ranks:
        assert rank["peers"]
        assert rank["in place"]
        # [1, 8] in float32 and bfloat16, [64, 3] in both, and two products; [7, 33] is no multiple of 16 bytes.
        assert rank["sizes"] == [32, 16, 768, 384, 7 * 32, 3 * 32]
        assert all(torch.equal(total, one + other) for total, one, other in zip(rank["sums"], *both, strict=True))
        assert (rank["products"][0] - product).abs().max() < 1e-5
        assert (rank["products"][1] - product[:3]).abs().max() < 1e-5


def test_gpus_apart_are_recognized():
    assert "several hosts" in module._why_apart([("a", 0), ("b", 0)], 0)
    # Each process sees one GPU, which it calls 0.
    assert "each other's GPUs" in module._why_apart([("a", 0), ("a", 0)], 0)
    if torch.cuda.device_count() < 2:
        assert "cannot access" in module._why_apart([("a", 0), ("a", 1)], 0)


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_ranks_meet_without_multicast(before: str | None, monkeypatch: pytest.MonkeyPatch):
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with contextlib.suppress(ValueError), module._without_multicast():
        assert os.environ[name] == "1"
        raise ValueError("the ranks did not meet")
    assert os.environ.get(name) == before
