"""Megatron's distributed optimizer against the plain one: the same weights after several steps, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dta.core.config import ParallelConfig
from megatron_dta.training.config import OptimizationConfig
from mesh_worker import run_on_ranks
from tree_engine_cases import GRPO, QWEN2, QWEN3, branching_sequences, model_config, tree_config

SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = SHARDED | {"overlap_grad_reduce": True, "ddp_bucket_size": 900}
TP = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
CASES = {
    2: {
        "qwen2 bfloat16": (ParallelConfig(), QWEN2, torch.bfloat16),
    },
    4: {"tp2-sp-dp2": (TP, QWEN3, torch.float32)},
}


# What a run uses before and after its checkpoint, its dtype, and whether it then goes on bit for bit.


def _train(parallel: ParallelConfig, settings: dict, dtype: torch.dtype) -> tuple[list, dict[str, torch.Tensor]]:
    """Losses and gradient norms of steps, in the third of which one replica is idle, and the weights then."""
    from megatron_dta.core.engine import StepPart, TreeEngine, prepare_batch
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import current_mesh, destroy_parallel, initialize_parallel
    from megatron_dta.core.objectives.weights import count_trained
    from megatron_dta.extras.parity import random_training_samples
    from megatron_dta.training.optimizer.build import TrainingOptimizer

    destroy_parallel()
    device, mesh = initialize_parallel(5, parallel), current_mesh()
    # As many rows of the embedding on one tensor rank as on two, so that their random weights are the same.
    unit = 8 // parallel.tensor_model_parallel_size
    config = model_config(dtype, **settings, make_vocab_size_divisible_by=unit)
    model = build_model(config, device, parallel)
    # Clipping would multiply by the norm, which the two add up in another order.
    settings_of_steps = OptimizationConfig(train_iters=5, lr=1e-2, clip_grad=0.0)
    optimizer = TrainingOptimizer(model, settings_of_steps, parallel)
    engine = TreeEngine(optimizer.chunks)
    samples = random_training_samples(branching_sequences(np.random.default_rng(3), count=6, longest=20), seed=3)
    counts = count_trained([sample.num_trained for sample in samples])
    record = []
    for step in range(4):
        cut = len(samples) if step == 2 or mesh.data_size == 1 else 4
        rank_samples = samples[:cut] if mesh.data_rank == 0 else samples[cut:]
        optimizer.zero_grad()
        batch = prepare_batch(rank_samples, tree_config("dta", 9), pipeline=engine.pipeline(9), part=StepPart(counts))
        loss = float(engine.forward_backward(batch, GRPO).loss)
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
