"""Sums over a tensor group for decoding passes: here those of ``all_reduce``; see ``tests/gpu/test_gpu_tensor_decode``
for those that read peer memory."""

from __future__ import annotations

from typing import Any

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
    tensor_sum = module.tensor_sum()
    assert tensor_sum.reads_peers is None
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(10 + rank))
    results = {
        "sums": [tensor_sum(term) for term in terms(rank)],
        "product": tensor_sum.product(terms(rank)[5], weight),
        "peers": tensor_sum.reads_peers,
        "is one": module.tensor_sum() is tensor_sum,
    }
    destroy_parallel()
    initialize_parallel(5, ParallelConfig(tensor_model_parallel_size=2))
    return results | {"is another": module.tensor_sum() is not tensor_sum}


def test_sums_over_gloo(tmp_path):
    ranks = run_on_ranks(sums_on_rank, None, 2, tmp_path / "mesh", "gloo")
    both = [terms(0), terms(1)]
    weights = [torch.randn(5, 33, generator=torch.Generator().manual_seed(10 + rank)) for rank in (0, 1)]
    product = both[0][5] @ weights[0].t() + both[1][5] @ weights[1].t()
    for rank in ranks:
        assert rank["peers"] is False
        assert rank["is one"]
        assert rank["is another"]
        assert all(torch.equal(total, first + other) for total, first, other in zip(rank["sums"], *both, strict=True))
        assert torch.equal(rank["product"], product)


def test_gpus_apart_are_recognized():
    assert "several hosts" in module._why_apart([("a", 0), ("b", 0)], 0)
    # Each process sees one GPU, which it calls 0.
    assert "each other's GPUs" in module._why_apart([("a", 0), ("a", 0)], 0)
    if torch.cuda.device_count() < 2:
        assert "cannot access" in module._why_apart([("a", 0), ("a", 1)], 0)
