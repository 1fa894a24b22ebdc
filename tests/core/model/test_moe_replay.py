"""Replayed routing of rollouts: exact, resolved where rollouts share tokens, stored in files."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.planning.step.routing_replay import (
    agree_on_routing,
    keys_by_routing,
    replaced_share,
    shaped_routing,
)
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock
from megatron_dta.extras.parity.outcome import Outcome
from megatron_dta.extras.parity.plain_router import PlainRouter
from moe_cases import BALANCE, QWEN3_MOE, moe_weights
from tree_engine_cases import GRPO, TEMPERATURE, branching_sequences, model_config, tree_config

LAYERS, TOPK, EXPERTS = 2, 2, 6


def random_routing(generator: np.random.Generator, length: int, known: float = 0.8) -> np.ndarray:
    routing = generator.random((length, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOPK].astype(np.int16)
    routing[generator.random((length, LAYERS)) > known] = -1
    return routing


@pytest.mark.parametrize("cut", [("packed", 45, 0), ("dta", 6), ("dta", 9, 0)], ids=str)
def test_replay_equals_stock_megatron_with_the_same_choices(monkeypatch: pytest.MonkeyPatch, cut: tuple) -> None:
    model = model_config(**QWEN3_MOE, **BALANCE)
    weights = moe_weights(model, seed=5)
    generator = seed_all(11)
    samples = random_training_samples(branching_sequences(generator, count=6, longest=16), seed=11)
    sequences = [sample.token_ids for sample in samples]
    agreed = agree_on_routing(sequences, [random_routing(generator, len(sequence)) for sequence in sequences])
    samples = [replace(sample, routed_experts=experts) for sample, experts in zip(samples, agreed, strict=True)]

    tree_model = build_model(model, torch.device("cpu"))
    tree_model.load_state_dict(weights)
    engine = TreeEngine(tree_model, TEMPERATURE, routing_replay=True)
    batch = prepare_batch(samples, tree_config(*cut))
    logprobs = engine.compute_logprobs(batch)
    loss = float(engine.forward_backward(batch, GRPO).loss)
    actual = Outcome(loss, logprobs, {name: p.grad for name, p in tree_model.named_parameters()})

    rows: dict[int, list[np.ndarray]] = {}
    for layer in range(LAYERS):
        rows[layer] = [
            row
            for sample, experts in zip(samples, agreed, strict=True)
            for row in experts[: sample.needed_length, layer]
        ]
    routed_by = PlainRouter._experts_of

    def recorded(router: PlainRouter, logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        choice = rows[router.layer_number - 1].pop(0)
        if choice[0] < 0:
            return routed_by(router, logits, scores)
        return torch.zeros_like(scores, dtype=torch.bool).index_fill(0, torch.from_numpy(choice.astype(np.int64)), True)

    monkeypatch.setattr(PlainRouter, "_experts_of", recorded)
    expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    errors = compare_outcomes(actual, expected)
    assert errors.largest() < 1e-12, errors
    assert not any(rows.values())


@pytest.mark.parametrize("mode", ["dta", "packed"])
def test_forks_replay_every_choice(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Rollouts that were routed differently share nothing from there on: equal to each with its own choices."""
    model = model_config(**QWEN3_MOE)
    weights = moe_weights(model, seed=5)
    generator = seed_all(13)
    samples = random_training_samples(branching_sequences(generator, count=6, longest=16), seed=13)
    sequences = [sample.token_ids for sample in samples]
    together = agree_on_routing(sequences, [random_routing(generator, len(sequence), 1.0) for sequence in sequences])
    forked_routing = [experts.copy() for experts in together]
    for number in (1, 4, 7):  # these leave the others somewhere
        forked_routing[number][len(forked_routing[number]) // 2] = random_routing(generator, 1, 1.0)[0]
    keys = keys_by_routing(sequences, forked_routing)
    trees = [build_prefix_tree(rows).num_tokens for rows in (sequences, keys)]
    assert trees[0] < trees[1] < sum(map(len, sequences))
    assert agree_on_routing(keys, forked_routing)[4] is not forked_routing[4]
    assert all(map(np.array_equal, agree_on_routing(keys, forked_routing), forked_routing))
    routed = [replace(sample, routed_experts=experts) for sample, experts in zip(samples, forked_routing, strict=True)]
    forked = [replace(sample, tree_keys=row_keys) for sample, row_keys in zip(routed, keys, strict=True)]
    tree_model = build_model(model, torch.device("cpu"))
    tree_model.load_state_dict(weights)
    engine = TreeEngine(tree_model, TEMPERATURE, routing_replay=True)
    outcomes = []
    for chosen, tree in ((forked, tree_config(mode, 45 if mode == "packed" else 6)), (routed, tree_config("dense", 9))):
        tree_model.zero_grad()
        batch = prepare_batch(chosen, tree)
        logprobs = engine.compute_logprobs(batch)
        loss = float(engine.forward_backward(batch, GRPO).loss)
        outcomes.append(Outcome(loss, logprobs, {name: p.grad.clone() for name, p in tree_model.named_parameters()}))
    assert compare_outcomes(*outcomes).largest() < 1e-12
    if mode == "dta":
        with pytest.raises(ValueError, match="routed otherwise than another"):
            prepare_batch(routed, tree_config(mode, 6))


@pytest.mark.parametrize("position", range(3))
def test_unknown_choices_join_the_first_rollout_that_knows_them(position: int) -> None:
    generator = seed_all(4)
    routing = [random_routing(generator, 3, 1.0) for _ in range(2)]
    routing[1][0] = routing[0][0]
    routing[1][1] = (routing[0][1] + 1) % EXPERTS
    unknown = routing[0].copy()
    unknown[1:] = -1
    routing.insert(position, unknown)
    keys = keys_by_routing([np.array([1, 2, 3])] * 3, routing)
    first, second = (number for number in range(3) if number != position)
    assert np.array_equal(keys[position], keys[first])
    assert keys[second][0] == keys[first][0]
    assert keys[second][1] != keys[first][1]
    assert np.array_equal(agree_on_routing(keys, routing)[position], routing[first])


def test_a_shared_token_goes_where_its_first_rollout_sent_it() -> None:
    generator = seed_all(3)
    sequences = [np.array(tokens) for tokens in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 6], [7])]
    routing = [random_routing(generator, len(sequence), 1.0) for sequence in sequences]
    routing[0][1, 0] = -1
    agreed = agree_on_routing(sequences, routing)
    assert np.array_equal(agreed[1][0], routing[0][0])
    assert np.array_equal(agreed[0][1, 0], routing[1][1, 0])
    assert np.array_equal(agreed[2][2], routing[0][2])
    assert np.array_equal(agreed[2][3], routing[2][3])
    assert np.array_equal(agreed[3], routing[3])
    replaced, known = 0, 0
    for experts, replayed in zip(routing, agreed, strict=True):
        for token, layer in np.ndindex(experts.shape[:2]):
            known += experts[token, layer, 0] >= 0
            replaced += experts[token, layer, 0] >= 0 and set(experts[token, layer]) != set(replayed[token, layer])
    assert 0 < replaced < known
    assert replaced_share(routing, agreed) == replaced / known
    assert replaced_share(routing, [choice[..., ::-1] for choice in routing]) == 0
    assert replaced_share([np.full_like(routing[0], -1)], [routing[0]]) == 0


def test_what_is_no_routing_is_refused() -> None:
    tokens = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    for wrong, message in (([1, 2], "no multiple of the 3 tokens"), ([-2] * 3, "neither an expert nor -1")):
        with pytest.raises(InputError, match=message):
            Rollout(**tokens, routed_experts=wrong)
    good = random_routing(seed_all(1), 3, 1.0)
    assert shaped_routing(good.reshape(-1), 3, LAYERS, TOPK, EXPERTS).shape == (3, LAYERS, TOPK)
    for entry, value, message in (
        ((1, 1), [6, 0], "beyond the 6 experts"),
        ((2, 0), [3, -1], "unknown in part"),
        ((0, 1), [4, 4], "the same expert twice"),
    ):
        wrong = good.copy()
        wrong[entry] = value
        with pytest.raises(InputError, match=f"token {entry[0]}, layer {entry[1]} is .* {message}"):
            shaped_routing(wrong.reshape(-1), 3, LAYERS, TOPK, EXPERTS)
    with pytest.raises(InputError, match="has 12 entries, but 3 tokens x 3 layers"):
        shaped_routing(good.reshape(-1), 3, 3, TOPK, EXPERTS)
