"""A critic with experts: values and gradients against single sequences in float64, divided experts, and PPO runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import seed_all
from critic_trainer_cases import OWN, PPO
from megatron_dta.config import ParallelConfig
from megatron_dta.engine import TreeEngine, prepare_batch
from megatron_dta.model import build_model, initialize_parallel
from megatron_dta.objectives import make_value_objective
from megatron_dta.parity import random_training_samples
from megatron_dta.parity.plain_router import PlainRouter
from megatron_dta.rollouts import write_rollouts
from mesh_trainer_cases import SHAPE, SHARDED, _rows, train_on_rank
from mesh_worker import named_parameters, run_on_ranks
from moe_cases import DEEPSEEK_BALANCED, QWEN3_BALANCED
from moe_trainer_cases import EXPERTS
from objective_cases import largest_error, values_one_by_one
from trainer_cases import make_rollouts
from tree_engine_cases import branching_sequences, model_config, tree_config

CLIP = 0.1
MODELS = {"qwen3": QWEN3_BALANCED, "deepseek": DEEPSEEK_BALANCED}
EP = ParallelConfig(expert_model_parallel_size=2)


@pytest.fixture(scope="module", params=MODELS)
def case(request) -> tuple[Any, dict[str, torch.Tensor], list]:
    """A model, weights (a value head that is not near 0, biases of experts that differ), samples with old values."""
    generator = seed_all(83)
    samples = random_training_samples(branching_sequences(generator, count=9, longest=26), seed=83)
    model = model_config(vocab_size=8, **MODELS[request.param])
    built = build_model(model, initialize_parallel(6), value_head=True)
    weights = {name: p.detach().clone() for name, p in built.named_parameters()}
    weights["output_layer.weight"] = torch.randn_like(weights["output_layer.weight"])
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


def reference(case) -> tuple[float, list[np.ndarray], dict[str, torch.Tensor]]:
    """Loss without the auxiliary ones, values, and gradients of both."""
    model, weights, samples = case
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
    gradients["output_layer.weight"] = gradients["output_layer.weight"][:1]
    return float(loss.detach()), [value.detach().numpy() for value in values], gradients


@pytest.mark.parametrize("cut", [("dense", 9, None), ("packed", 45, None), ("dta", 5, None), ("dta", 7, 0)], ids=str)
def test_values_and_gradients_equal_single_sequences(case, cut):
    loss, values, expected = reference(case)
    model, weights, samples = case
    critic = build_model(model, initialize_parallel(6), value_head=True)
    critic.load_state_dict(weights)
    engine, batch = TreeEngine(critic, 1.0, 5), prepare_batch(samples, tree_config(*cut))
    for found, value, sample in zip(engine.compute_logprobs(batch), values, samples, strict=True):
        np.testing.assert_allclose(found[sample.loss_mask], value, rtol=1e-12, atol=1e-13)
    result = engine.forward_backward(batch, make_value_objective(CLIP))
    assert float(result.loss) == pytest.approx(loss, rel=1e-12)
    assert largest_error({name: p.grad for name, p in critic.named_parameters()}, expected) < 1e-12
    assert {"seq_load_balancing_loss", "z_loss"} <= result.metrics.keys()


def on_two_ranks(rank: int, argument: tuple) -> dict[str, Any]:
    """Values, loss and gradients of this rank's samples and experts."""
    from megatron_dta.config import OptimizationConfig
    from megatron_dta.model import current_mesh
    from megatron_dta.objectives.weights import count_trained
    from megatron_dta.training.optimizer import TrainingOptimizer

    (model, weights, samples), partition = argument
    device = initialize_parallel(5, EP)
    mesh = current_mesh()
    critic = build_model(model, device, EP, value_head=True)
    parameters = named_parameters(critic)
    biases = {name: b for part in critic.parts for name, b in part.named_buffers() if name.endswith("expert_bias")}
    with torch.no_grad():
        for name, tensor in (parameters | biases).items():
            tensor.copy_(weights[name])
    optimizer = TrainingOptimizer(critic, OptimizationConfig(train_iters=1, lr=1e-3), EP)
    engine, own = TreeEngine(optimizer.chunks, 1.0, 5), partition[mesh.data_rank]
    counts = count_trained([sample.num_trained for sample in samples])
    batch = prepare_batch([samples[i] for i in own], tree_config("dta", 6), "token-mean", counts, engine.pipeline(6))
    values = engine.compute_logprobs(batch)
    optimizer.zero_grad()
    result = engine.forward_backward(batch, make_value_objective(CLIP))
    optimizer.reduce_gradients()
    gradients = {name: p.main_grad.clone() for name, p in parameters.items()}
    return {"values": dict(zip(own, values, strict=True)), "loss": float(result.loss), "gradients": gradients}


@pytest.mark.parametrize("cut", [4, 9], ids=["uneven", "one idle"])
def test_divided_experts_give_the_same(case, cut, tmp_path: Path):
    loss, values, expected = reference(case)
    count = len(case[2])
    ranks = run_on_ranks(on_two_ranks, (case, [list(range(cut)), list(range(cut, count))]), 2, tmp_path / "mesh")
    seen: dict[str, int] = {}
    for rank in ranks:
        assert rank["loss"] == pytest.approx(loss, rel=1e-12)
        for number, found in rank["values"].items():
            np.testing.assert_allclose(found[case[2][number].loss_mask], values[number], rtol=1e-12, atol=1e-13)
        for name, gradient in rank["gradients"].items():
            seen[name] = seen.get(name, 0) + 1
            # An expert that no token went to has a gradient of 0.
            scale = float(expected[name].abs().max()) or 1.0
            assert float((gradient - expected[name]).abs().max()) < 1e-11 * scale, name
    assert seen.keys() == expected.keys()
    assert {times for name, times in seen.items() if ".local_experts." in name} == {1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PPO of a policy and a critic with experts, on one process and divided over two."""
    path = tmp_path_factory.mktemp("runs")
    write_rollouts(path / "train.jsonl", make_rollouts(seed_all(3), 6, 4))
    common = (
        f"{SHAPE} {EXPERTS} --make-vocab-size-divisible-by 2 --global-batch-size 8 --tree-segment-tokens 7 "
        f"--rollouts {path}/train.jsonl {PPO}"
    )

    def job(name: str, flags: str, iters: int = 4) -> tuple[str, None]:
        weights = f"--load {path}/start --finetune --critic-load {path}/start"
        return f"{common} {flags} {weights} --train-iters {iters} --save {path}/{name}", None

    divided = "--expert-model-parallel-size 2"
    ones = [(f"{common} --train-iters 1 --save {path}/start", None), job("one", ""), job("moved", "", iters=2)]
    twos = [job("ep", divided), job("cut", f"{divided} {SHARDED}", iters=2), job("cut", f"{divided} {SHARDED}")]
    twos += [job("unbroken", f"{divided} {SHARDED}"), job("moved", divided)]
    for jobs, world_size in ((ones, 1), (twos, 2)):
        run_on_ranks(train_on_rank, jobs, world_size, path / f"ranks-{world_size}")
    return path


@pytest.mark.parametrize("name", ["ep", "moved"])
def test_runs_are_those_of_one_process(folder: Path, name: str) -> None:
    expected, found = _rows(folder / "one"), _rows(folder / name)
    assert len(found) == 4
    for left, right in zip(expected, found, strict=True):
        assert left.keys() == right.keys()
        assert {"critic_seq_load_balancing_loss", "critic_z_loss"} <= left.keys()
        for key in left.keys() - OWN:
            assert right[key] == pytest.approx(left[key], rel=2e-3, abs=2e-5), (name, key)


def test_a_run_goes_on_bit_for_bit(folder: Path) -> None:
    assert _rows(folder / "cut") == _rows(folder / "unbroken")
