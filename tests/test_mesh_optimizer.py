"""Megatron's distributed optimizer against the plain one: the same weights after several steps, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dta.config import OptimizationConfig, ParallelConfig
from mesh_worker import run_on_ranks
from test_tree_engine import GRPO, QWEN2, QWEN3, branching_sequences, model_config, tree_config

SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = SHARDED | {"overlap_grad_reduce": True, "ddp_bucket_size": 900}
TP = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
CASES = {
    2: {
        f"{name} {str(dtype)[6:]}": (ParallelConfig(), settings, dtype)
        for name, settings in (("qwen3", QWEN3), ("qwen2", QWEN2))
        for dtype in (torch.float32, torch.bfloat16)
    },
    4: {"tp2-sp-dp2": (TP, QWEN3, torch.float32)},
}


def _train(parallel: ParallelConfig, settings: dict, dtype: torch.dtype) -> tuple[list, dict[str, torch.Tensor]]:
    """Losses and gradient norms of four steps, in the third of which one replica is idle, and the weights then."""
    from megatron_dta.engine import TreeEngine, prepare_batch
    from megatron_dta.model import build_model, current_mesh, initialize_parallel
    from megatron_dta.objectives.weights import count_trained
    from megatron_dta.parity import random_training_samples
    from megatron_dta.training.optimizer import TrainingOptimizer

    device, mesh = initialize_parallel(5, parallel), current_mesh()
    model = build_model(model_config(dtype, **settings), device, parallel)
    # Clipping would multiply by the norm, which the two add up in another order.
    settings_of_steps = OptimizationConfig(train_iters=5, lr=1e-2, clip_grad=0.0)
    optimizer = TrainingOptimizer(model, settings_of_steps, parallel)
    engine = TreeEngine(optimizer.model)
    samples = random_training_samples(branching_sequences(np.random.default_rng(3), count=12, longest=30), seed=3)
    counts = count_trained([sample.num_trained for sample in samples])
    record = []
    for step in range(4):
        cut = len(samples) if step == 2 else 4
        own = samples[:cut] if mesh.data_rank == 0 else samples[cut:]
        optimizer.zero_grad()
        loss = float(engine.forward_backward(prepare_batch(own, tree_config("dta", 9), counts=counts), GRPO).loss)
        record.append((loss, optimizer.step(loss).grad_norm))
    return record, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _on_rank(rank: int, cases: dict[str, tuple]) -> dict[str, Any]:
    return {
        name: [_train(replace(parallel, **changes), *rest) for changes in ({}, SHARDED, OVERLAPPED)]
        for name, (parallel, *rest) in cases.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("optimizer")
    return {size: run_on_ranks(_on_rank, cases, size, path / str(size)) for size, cases in CASES.items()}


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_the_distributed_optimizer_makes_the_same_steps(results, world_size, name):
    for rank in results[world_size]:
        plain, *others = rank[name]
        for record, weights in others:
            assert [loss for loss, _ in record] == [loss for loss, _ in plain[0]]
            for (_, norm), (_, expected) in zip(record, plain[0], strict=True):
                assert norm == pytest.approx(expected, rel=1e-6)
            assert all(torch.equal(weight, plain[1][key]) for key, weight in weights.items())
