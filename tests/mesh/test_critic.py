"""The critic on a tree: values and gradients against single sequences in float64, on meshes, and with experts."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.engine import StepPart, TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_value_objective
from megatron_dta.extras.parity import random_training_samples
from megatron_dta.extras.parity.plain_router import PlainRouter
from mesh_worker import copy_shards, named_parameters, run_on_ranks
from moe_cases import DEEPSEEK_BALANCED, QWEN3_BALANCED
from objective_cases import largest_error, values_one_by_one
from tree_engine_cases import branching_sequences, model_config, tree_config

CUTS = [
    ("dense", ("packed", 45, None)), ("dense", ("dta", 7, 0)), ("qwen3-experts", ("dta", 5, None)),
    ("deepseek-experts", ("dta", 7, 0)),
]  # fmt: skip
CLIP = 0.1
HEAD = "output_layer.weight"
MODELS = {
    "dense": dict(qk_layernorm=True),
    "qwen3-experts": QWEN3_BALANCED | {"vocab_size": 8},
    "deepseek-experts": DEEPSEEK_BALANCED | {"vocab_size": 8},
}


@cache
def critic_case(name: str) -> tuple[Any, dict[str, torch.Tensor], list]:
    """A model, weights (a value head that is not near 0, biases of experts that differ), samples with old values."""
    generator = seed_all(71)
    samples = random_training_samples(branching_sequences(generator, count=7, longest=10), seed=71)
    model = model_config(**MODELS[name])
    built = build_model(model, initialize_parallel(71), value_head=True)
    weights = {name: p.detach().clone() for name, p in built.named_parameters()}
    weights[HEAD] = torch.randn_like(weights[HEAD])
    for name, bias in built.named_buffers():
        if name.endswith("expert_bias"):
            weights[name] = torch.randn_like(bias, dtype=torch.float32) / 8
    _, values = values_one_by_one(model, weights, samples)
    near = []
    for sample, value in zip(samples, values, strict=True):
        fields = {name: np.full(len(sample.token_ids), np.nan) for name in ("old_values", "returns")}
        fields["old_values"][sample.loss_mask] = value.detach().numpy() + generator.normal(0, 0.15, len(value))
        fields["returns"][sample.loss_mask] = value.detach().numpy() + generator.normal(0, 1, len(value))
        near.append(replace(sample, **fields))
    return model, weights, near


@cache
def reference(name: str) -> tuple[float, list[np.ndarray], dict[str, torch.Tensor]]:
    """Loss without the experts' auxiliary ones, values, and gradients of both, with the loss written out."""
    model, weights, samples = critic_case(name)
    stock, values = values_one_by_one(model, weights, samples)
    losses = []
    for sample, value in zip(samples, values, strict=True):
        old, returns = (torch.from_numpy(getattr(sample, name)[sample.loss_mask]) for name in ("old_values", "returns"))
        near = old + (value - old).clamp(-CLIP, CLIP)
        losses.append(torch.maximum((value - returns) ** 2, (near - returns) ** 2) / 2)
    loss = torch.cat(losses).mean()
    routers = [module for module in stock.modules() if isinstance(module, PlainRouter)]
    assert all(len(router.losses) == len(samples) for router in routers)
    (loss + sum(sum(router.losses) for router in routers) / len(samples)).backward()
    gradients = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    assert (gradients[HEAD][1:] == 0).all()
    gradients[HEAD] = gradients[HEAD][:1]
    return float(loss.detach()), [value.detach().numpy() for value in values], gradients


def critic_engine(case) -> tuple[torch.nn.Module, TreeEngine]:
    model, weights, _ = case
    critic = build_model(model, initialize_parallel(6), value_head=True)
    critic.load_state_dict(weights)
    return critic, TreeEngine(critic, 1.0, 5)


@pytest.mark.parametrize(("name", "cut"), CUTS, ids=str)
def test_values_and_gradients_equal_single_sequences(name, cut):
    case = critic_case(name)
    loss, values, expected = reference(name)
    critic, engine = critic_engine(case)
    batch = prepare_batch(case[2], tree_config(*cut))
    for actual, value, sample in zip(engine.compute_logprobs(batch), values, case[2], strict=True):
        np.testing.assert_allclose(actual[sample.loss_mask], value, rtol=1e-12, atol=1e-13)
        assert (actual[~sample.loss_mask] == 0).all()
    result = engine.forward_backward(batch, make_value_objective(CLIP))
    assert float(result.loss) == pytest.approx(loss, rel=1e-12)
    assert largest_error({name: p.grad for name, p in critic.named_parameters()}, expected) < 1e-12
    assert 0.05 < float(result.metrics["value_clip_fraction"]) < 0.95
    if case[0].num_experts:
        assert {"seq_load_balancing_loss", "z_loss"} <= result.metrics.keys()


def on_mesh(rank: int, argument: tuple) -> dict[str, Any]:
    """Values, loss and gradients of this rank's samples and of its share of the model."""
    from megatron_dta.core.model.parallel.mesh import current_mesh
    from megatron_dta.core.objectives.weights import count_trained
    from megatron_dta.training.config import OptimizationConfig
    from megatron_dta.training.optimizer.build import TrainingOptimizer

    (model, weights, samples), parallel, partition = argument
    device = initialize_parallel(5, parallel)
    mesh = current_mesh()
    critic = build_model(model, device, parallel, value_head=True)
    size = model.hidden_size // mesh.tensor_size
    columns = slice(mesh.tensor_rank * size, (mesh.tensor_rank + 1) * size)
    # Tensor-parallel ranks divide the value head by its columns.
    copy_shards(critic, weights, model, sharded={HEAD: weights[HEAD][:, columns]})
    optimizer = TrainingOptimizer(critic, OptimizationConfig(train_iters=1, lr=1e-3), parallel)
    engine, indices = TreeEngine(optimizer.chunks, 1.0, 5), partition[mesh.data_rank]
    counts = count_trained([sample.num_trained for sample in samples])
    mine, part = [samples[i] for i in indices], StepPart(counts)
    batch = prepare_batch(mine, tree_config("dta", 6), pipeline=engine.pipeline(6), part=part)
    values = engine.compute_logprobs(batch)
    optimizer.zero_grad()
    result = engine.forward_backward(batch, make_value_objective(CLIP))
    optimizer.reduce_gradients()
    gradients = {name: p.main_grad.clone() for name, p in named_parameters(critic).items()}
    optimizer.optimizer.prepare_grads()
    return {
        "values": dict(zip(indices, values, strict=True)),
        "loss": float(result.loss),
        "gradients": gradients,
        "norm": float(optimizer.optimizer.get_grad_norm()),
        "columns": columns,
    }


def check_ranks(name: str, parallel: ParallelConfig, parts: list[list[int]], folder: Path) -> dict[str, int]:
    """Every rank finds the reference; returns on how many ranks each gradient is."""
    case = critic_case(name)
    ranks = run_on_ranks(on_mesh, (case, parallel, parts), 2, folder)
    loss, values, expected = reference(name)
    norm = sum(float((gradient**2).sum()) for gradient in expected.values()) ** 0.5
    seen: dict[str, int] = {}
    for rank in ranks:
        assert rank["loss"] == pytest.approx(loss, rel=1e-12)
        assert rank["norm"] == pytest.approx(norm, rel=1e-6)  # Megatron computes it in float32
        for number, actual in rank["values"].items():
            np.testing.assert_allclose(actual[case[2][number].loss_mask], values[number], rtol=1e-12, atol=1e-13)
        for name, gradient in rank["gradients"].items():
            unsharded = expected[name][:, rank["columns"]] if name == HEAD else expected[name]
            seen[name] = seen.get(name, 0) + 1
            if gradient.shape == unsharded.shape:  # the rest of a tensor group's parts is tested by its norm
                # An expert that no token went to has a gradient of 0.
                scale = float(unsharded.abs().max()) or 1.0
                assert float((gradient - unsharded).abs().max()) < 1e-11 * scale, name
    assert seen.keys() == expected.keys()
    return seen


@pytest.mark.parametrize(
    ("parallel", "replicas"),
    [
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 1),
        ({"pipeline_model_parallel_size": 2}, 1),
        ({}, 2),
    ],
    ids=["sequence", "pipeline", "data"],
)
def test_meshes_give_the_same(parallel, replicas, tmp_path: Path):
    count = len(critic_case("dense")[2])
    parts = [list(range(count))] if replicas == 1 else [list(range(3)), list(range(3, count))]
    check_ranks("dense", ParallelConfig(**parallel), parts, tmp_path / "mesh")


@pytest.mark.parametrize(("model", "cut"), [("qwen3-experts", 4), ("deepseek-experts", 9)], ids=["uneven", "one idle"])
def test_divided_experts_give_the_same(model, cut, tmp_path: Path):
    parts = [list(range(cut)), list(range(cut, len(critic_case(model)[2])))]
    seen = check_ranks(model, ParallelConfig(expert_model_parallel_size=2), parts, tmp_path / "mesh")
    assert {times for name, times in seen.items() if ".local_experts." in name} == {1}
