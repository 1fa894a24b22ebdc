"""Memory limits: the bytes that stay, the settings they exclude, and steps whose gradients do not depend on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.optimizer.build import TrainingOptimizer, data_parallel_chunks


def tiny_model(dtype: torch.dtype = torch.float64) -> ModelConfig:
    return ModelConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        vocab_size=40,
        swiglu=True,
        disable_bias_linear=True,
        params_dtype=dtype,
    )


def test_gradients_do_not_depend_on_the_memory() -> None:
    generator = seed_all(7)
    trunk = generator.integers(0, 40, 300)
    samples = []
    for _ in range(4):
        tokens = torch.cat([torch.tensor(trunk), torch.tensor(generator.integers(0, 40, 150))]).numpy().astype("int32")
        mask = generator.random(450) < 0.3
        mask[0], mask[-1] = False, True
        samples.append(TrainingSample(tokens, mask))
    model = build_model(tiny_model(), initialize_parallel(1))
    objective = make_objective(ObjectiveConfig(objective="sft"))

    def gradients(engine: TreeEngine, tree: TreeConfig) -> tuple[list[torch.Tensor], int, int]:
        model.zero_grad()
        batch = prepare_batch(samples, tree, pipeline=engine.pipeline(tree.tree_segment_tokens))
        result = engine.forward_backward(batch, objective)
        gradients = [p.grad.clone() for p in model.parameters()]
        return gradients, result.recomputed_tokens, batch.plan.segments.num_segments

    engine = TreeEngine(model, logprob_chunk_tokens=8)
    expected, none, _ = gradients(engine, TreeConfig(tree_segment_tokens=64))
    assert none == 0
    constant = constant_bytes([model])
    tree = TreeConfig(tree_segment_tokens=64, tree_memory_gib=1e-6)
    engine.limit_memory(1e-6, constant)
    with pytest.raises(InputError, match="GiB too small"):
        gradients(engine, tree)
    recomputed = []
    for extra in (1.2e6, 1.5e6, 8e6):
        engine.limit_memory((constant + extra) / GIB, constant)
        computed, again, segments = gradients(engine, tree)
        recomputed.append(again)
        assert segments > 1
        for one, other in zip(computed, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert recomputed[0] > recomputed[-1] == 0
    with pytest.raises(ValueError, match="limit_memory"):
        prepare_batch(samples, tree)


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4 + 4 + 8), (torch.bfloat16, 2 + 4 + 12)])
def test_bytes_that_stay_the_same(dtype: torch.dtype, bytes_each: int) -> None:
    model = build_model(tiny_model(dtype), initialize_parallel(1))
    count = sum(p.numel() for p in model.parameters())
    settings, without = OptimizationConfig(lr=1e-3, train_iters=1), 6 if dtype == torch.bfloat16 else 8
    chunks = data_parallel_chunks(model, ParallelConfig())
    assert constant_bytes(chunks, settings) == bytes_each * count
    assert constant_bytes(chunks, settings, 4) == (without + (bytes_each - without) / 4) * count
    assert constant_bytes(chunks) == without * count
    offloaded = replace(settings, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75, exp_avg_dtype="bf16")
    states = bytes_each - without if dtype == torch.float32 else 4 + 2 + 4
    assert constant_bytes(chunks, offloaded) == (without + states / 4) * count
    frozen = build_model(tiny_model(dtype), initialize_parallel(1)).requires_grad_(False)
    assert constant_bytes([frozen]) == count * dtype.itemsize
    # What Adam really holds after a step.
    if dtype == torch.float32:
        optimizer = TrainingOptimizer(model, settings)
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.main_grad.fill_(1.0)
        optimizer.step(0.0)
        (adam,) = getattr(optimizer.optimizer, "chained_optimizers", [optimizer.optimizer])
        states = [v for s in adam.optimizer.state.values() for k, v in s.items() if k != "step"]
        assert sum(v.numel() * v.element_size() for v in states if torch.is_tensor(v)) == 8 * count
