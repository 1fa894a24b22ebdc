"""The critic on a tree: values and gradients against single sequences in float64, on meshes, and its advantages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.config import ParallelConfig
from megatron_dta.engine import TreeEngine, prepare_batch
from megatron_dta.model import build_model, initialize_parallel
from megatron_dta.objectives import LossFields, make_value_objective
from megatron_dta.objectives.gae import generalized_advantages, token_rewards, whiten
from megatron_dta.objectives.value import explained_variance, value_loss
from megatron_dta.rollouts import Rollout
from mesh_worker import named_parameters, run_on_ranks
from objective_cases import largest_error, values_one_by_one
from tree_engine_cases import branching_sequences, model_config, tree_config

CUTS = [("dense", 9, None), ("packed", 45, None), ("dta", 5, None), ("dta", 7, 0)]
CLIP = 0.1


def critic_case(seed: int) -> tuple[Any, dict[str, torch.Tensor], list]:
    from megatron_dta.parity import random_training_samples

    generator = seed_all(seed)
    samples = random_training_samples(branching_sequences(generator, count=9, longest=30), seed=seed)
    model = model_config(qk_layernorm=True)
    device = initialize_parallel(seed)
    weights = {name: p.detach() for name, p in build_model(model, device, value_head=True).named_parameters()}
    weights["output_layer.weight"] = torch.randn_like(weights["output_layer.weight"])
    _, values = values_one_by_one(model, weights, samples)
    near = []
    for sample, value in zip(samples, values, strict=True):
        fields = {name: np.full(len(sample.token_ids), np.nan) for name in ("old_values", "returns")}
        fields["old_values"][sample.loss_mask] = value.detach().numpy() + generator.normal(0, 0.15, len(value))
        fields["returns"][sample.loss_mask] = value.detach().numpy() + generator.normal(0, 1, len(value))
        near.append(replace(sample, **fields))
    return model, weights, near


@pytest.fixture(scope="module")
def case():
    return critic_case(71)


def reference(case) -> tuple[float, list[np.ndarray], dict[str, torch.Tensor]]:
    """Loss, values and gradients of the loss written out."""
    model, weights, samples = case
    stock, values = values_one_by_one(model, weights, samples)
    losses = []
    for sample, value in zip(samples, values, strict=True):
        old, returns = (torch.from_numpy(getattr(sample, name)[sample.loss_mask]) for name in ("old_values", "returns"))
        near = old + (value - old).clamp(-CLIP, CLIP)
        losses.append(torch.maximum((value - returns) ** 2, (near - returns) ** 2) / 2)
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in stock.named_parameters()}
    assert (gradients["output_layer.weight"][1:] == 0).all()
    gradients["output_layer.weight"] = gradients["output_layer.weight"][:1]
    return float(loss.detach()), [value.detach().numpy() for value in values], gradients


def critic_engine(case) -> tuple[torch.nn.Module, TreeEngine]:
    model, weights, _ = case
    critic = build_model(model, torch.device("cpu"), value_head=True)
    critic.load_state_dict(weights)
    return critic, TreeEngine(critic, 1.0, 5)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_values_and_gradients_equal_single_sequences(case, cut):
    loss, values, expected = reference(case)
    critic, engine = critic_engine(case)
    batch = prepare_batch(case[2], tree_config(*cut))
    for found, value, sample in zip(engine.compute_logprobs(batch), values, case[2], strict=True):
        np.testing.assert_allclose(found[sample.loss_mask], value, rtol=1e-12, atol=1e-13)
        assert (found[~sample.loss_mask] == 0).all()
    result = engine.forward_backward(batch, make_value_objective(CLIP))
    assert float(result.loss) == pytest.approx(loss, rel=1e-12)
    assert largest_error({name: p.grad for name, p in critic.named_parameters()}, expected) < 1e-12
    assert 0.05 < float(result.metrics["value_clip_fraction"]) < 0.95


@pytest.mark.parametrize("seed", range(4))
def test_only_values_beyond_the_clip_count_as_clipped(seed):
    """In float32 many values within the clip have, by rounding, another loss with it than without."""
    rng = seed_all(seed)
    inside = torch.arange(400) < 200
    old, present, returns = (
        torch.from_numpy(rng.uniform(-CLIP / 2, CLIP / 2, 400).astype(np.float32)) for _ in range(3)
    )
    present = torch.where(inside, present, old + present.sign() * CLIP * 2)
    fields = LossFields(loss_mask=torch.ones(400, dtype=torch.bool), old_values=old, returns=returns)
    found = value_loss(present, None, fields, value_clip=CLIP)
    bound = old + (present - old).sign() * CLIP
    expected = ~inside & ((bound - returns).abs() > (present - returns).abs())
    assert found.metrics["value_clip_fraction"].tolist() == expected.tolist()
    # Only a return beyond the value itself is farther from the bound than from the value.
    far = value_loss(present, None, replace(fields, returns=present), value_clip=CLIP)
    assert far.metrics["value_clip_fraction"].tolist() == (~inside).tolist()


def test_a_sibling_changes_no_bit_of_a_value(case):
    _, engine = critic_engine(case)
    samples = case[2]
    changed = replace(samples[1], token_ids=np.append(samples[1].token_ids[:-1], (samples[1].token_ids[-1] + 1) % 7))
    longer = [replace(samples[0], loss_mask=np.arange(len(samples[0].token_ids)) > 0)]
    before, after = (
        engine.compute_logprobs(prepare_batch([*longer, sample], tree_config("dta", 5)))[0]
        for sample in (samples[1], changed)
    )
    assert np.array_equal(before, after)


def on_mesh(rank: int, argument: tuple) -> dict[str, Any]:
    """Values, loss and gradients of this rank's part."""
    from megatron_dta.config import OptimizationConfig
    from megatron_dta.model import current_mesh
    from megatron_dta.objectives.weights import count_trained
    from megatron_dta.training.optimizer import TrainingOptimizer

    (model, weights, samples), parallel, partition = argument
    device = initialize_parallel(5, parallel)
    mesh = current_mesh()
    critic = build_model(model, device, parallel, value_head=True)
    from megatron_dta.parity.shards import shard_weights

    trunk = {name: w for name, w in weights.items() if name != "output_layer.weight"}
    shard = shard_weights(trunk, model, mesh.tensor_rank, mesh.tensor_size)
    size = model.hidden_size // mesh.tensor_size
    columns = slice(mesh.tensor_rank * size, (mesh.tensor_rank + 1) * size)
    shard["output_layer.weight"] = weights["output_layer.weight"][:, columns]
    parameters = named_parameters(critic)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard[name])
    optimizer = TrainingOptimizer(critic, OptimizationConfig(train_iters=1, lr=1e-3), parallel)
    engine = TreeEngine(optimizer.chunks, 1.0, 5)
    own = [samples[i] for i in partition[mesh.data_rank]]
    counts = count_trained([sample.num_trained for sample in samples])
    batch = prepare_batch(own, tree_config("dta", 6), "token-mean", counts, engine.pipeline(6))
    values = engine.compute_logprobs(batch)
    optimizer.zero_grad()
    result = engine.forward_backward(batch, make_value_objective(CLIP))
    optimizer.reduce_gradients()
    gradients = {name: p.main_grad.clone() for name, p in parameters.items()}
    optimizer.optimizer.prepare_grads()
    norm = float(optimizer.optimizer.get_grad_norm())
    return {
        "values": dict(zip(partition[mesh.data_rank], values, strict=True)),
        "loss": float(result.loss),
        "gradients": gradients,
        "expected": shard,
        "norm": norm,
        "columns": (columns.start, columns.stop),
    }


@pytest.mark.parametrize(
    ("parallel", "partition"),
    [
        ({"tensor_model_parallel_size": 2}, 1),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 1),
        ({"pipeline_model_parallel_size": 2}, 1),
        ({}, 2),
    ],
    ids=["tensor", "sequence", "pipeline", "data"],
)
def test_meshes_give_the_same(case, parallel, partition, tmp_path: Path):
    loss, values, expected = reference(case)
    count = len(case[2])
    parts = [list(range(count))] if partition == 1 else [list(range(3)), list(range(3, count))]
    ranks = run_on_ranks(on_mesh, (case, ParallelConfig(**parallel), parts), 2, tmp_path / "mesh")
    norm = sum(float((gradient**2).sum()) for gradient in expected.values()) ** 0.5
    seen = set()
    for rank in ranks:
        assert rank["loss"] == pytest.approx(loss, rel=1e-12)
        assert rank["norm"] == pytest.approx(norm, rel=1e-6)  # Megatron computes it in float32
        for number, found in rank["values"].items():
            np.testing.assert_allclose(found[case[2][number].loss_mask], values[number], rtol=1e-12, atol=1e-13)
        for name, gradient in rank["gradients"].items():
            whole = expected[name]
            if name == "output_layer.weight":
                whole = whole[:, slice(*rank["columns"])]
            seen.add(name)
            if gradient.shape == whole.shape:  # the rest of a tensor group's parts is tested by its norm
                torch.testing.assert_close(gradient, whole, rtol=1e-11, atol=1e-13)
    assert seen == expected.keys()


# -------------------------------------------------------------------------------------------------------- advantages


def slow_advantages(rewards, values, mask, gamma, lam):
    """From the definition: A_t = sum over later deltas, each discounted."""
    trained = np.flatnonzero(mask)
    advantages = np.zeros(len(mask))
    for i, t in enumerate(trained):
        for k in range(i, len(trained)):
            after = values[trained[k + 1]] if k + 1 < len(trained) else 0.0
            delta = rewards[trained[k]] + gamma * after - values[trained[k]]
            advantages[t] += (gamma * lam) ** (k - i) * delta
    return advantages


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.5, 0.0)])
def test_advantages_by_the_definition(seed, gamma, lam):
    rng = seed_all(seed)
    masks = [rng.random(rng.integers(1, 14)) < 0.6 for _ in range(7)]
    rewards = [np.where(mask, rng.normal(size=len(mask)), np.nan) for mask in masks]
    values = [np.where(mask, rng.normal(size=len(mask)), np.nan) for mask in masks]
    found, returns = generalized_advantages(rewards, values, masks, gamma, lam)
    for a, r, reward, value, mask in zip(found, returns, rewards, values, masks, strict=True):
        expected = slow_advantages(reward, value, mask, gamma, lam)
        np.testing.assert_allclose(a, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(r[mask], expected[mask] + value[mask], rtol=1e-12, atol=1e-12)
        assert (r[~mask] == 0).all()


def test_rewards_come_with_trained_tokens():
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
    plain = Rollout(np.arange(8), mask, reward=2.5)
    np.testing.assert_array_equal(token_rewards(plain), [0, 0, 0, 0, 0, 0, 2.5, 0])
    turns = Rollout(
        np.arange(8),
        mask,
        reward=3.5,
        segment_ends=[2, 4, 8],
        branches=[0, 0, 0],
        segment_rewards=[0.5, 1.0, 2.0],
    )
    # What came before the first trained token is received with it.
    np.testing.assert_array_equal(token_rewards(turns), [0, 0, 0.5, 1.0, 0, 0, 2.0, 0])
    # Where segments follow each other without a pause, a reward does not slip to the next segment's first token.
    sampled = Rollout(
        np.arange(8),
        np.arange(8) >= 2,
        reward=3.5,
        segment_ends=[3, 5, 8],
        branches=[0, 0, 0],
        segment_rewards=[0.5, 1.0, 2.0],
    )
    np.testing.assert_array_equal(token_rewards(sampled), [0, 0, 0.5, 0, 1.0, 0, 0, 2.0])


def test_whitened_advantages_have_mean_0_and_variance_1():
    rng = seed_all(3)
    masks = [rng.random(20) < 0.5 for _ in range(6)]
    advantages = [rng.normal(3, 5, size=20) for _ in masks]
    white = whiten(advantages, masks)
    values = np.concatenate([w[m] for w, m in zip(white, masks, strict=True)])
    assert values.mean() == pytest.approx(0, abs=1e-12)
    assert values.std() == pytest.approx(1, rel=1e-6)
    assert all((w[~m] == 0).all() for w, m in zip(white, masks, strict=True))


def test_equal_advantages_whiten_to_nothing():
    """Of equal large values the mean is off by rounding, which must not become a signal."""
    rng = seed_all(9)
    for _ in range(300):
        value, count = 10 ** rng.uniform(-3, 12), int(rng.integers(2, 60))
        advantages = [np.full(int(length), value) for length in rng.integers(1, 30, count)]
        white = whiten(advantages, [np.ones(len(each), bool) for each in advantages])
        assert all((each == 0).all() for each in white)
    # A small spread is one, though.
    white = whiten([np.array([1e6, 1e6 + 1e-3])], [np.ones(2, bool)])
    np.testing.assert_allclose(white[0], [-1, 1], rtol=1e-2)


def test_explained_variance_by_the_definition():
    rng = seed_all(4)
    returns, values = rng.normal(size=50), rng.normal(size=50)
    means = {
        "return": returns.mean(),
        "squared_return": (returns**2).mean(),
        "value_error": (values - returns).mean(),
        "squared_value_error": ((values - returns) ** 2).mean(),
    }
    assert explained_variance(means) == pytest.approx(1 - (returns - values).var() / returns.var())
    assert explained_variance({**means, "return": 0.3, "squared_return": 0.3**2}) == 0
