"""K, V and their gradients on the host: the same loss, logprobs and gradients, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.model import HostSlots, OffloadedKVPool
from megatron_dta.model.attention.kv_offload import _Buffer
from megatron_dta.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from megatron_dta.planning.costs.kv_offload import layers_on_device, layers_on_host
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of


@pytest.fixture(scope="module")
def case():
    """A model of five layers, its weights, samples, and the outcome of one sequence at a time."""
    model = model_config(**QWEN3, num_layers=5)
    weights = weights_of(model, seed=5)
    samples = random_training_samples(branching_sequences(seed_all(11), count=9), seed=11)
    return model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Whatever a buffer or the host holds before it is written is NaN, and a buffer loses its layer at every reuse."""
    memory, take = HostSlots.memory, _Buffer.take

    def take_poisoned(buffer, layer, runs):
        for tensor in buffer.slots:
            if tensor is not None:
                tensor.fill_(float("nan"))
        take(buffer, layer, runs)

    # Bytes of 255 are NaN in every floating-point type.
    monkeypatch.setattr(HostSlots, "memory", lambda *arguments: memory(*arguments).fill_(255))
    monkeypatch.setattr(_Buffer, "take", take_poisoned)


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("fraction", "segment_tokens", "activation_tokens", "settings"),
    [(1.0, 6, None, {}), (1.0, 6, 0, {}), (0.5, 10, 12, {}), (0.2, 6, 0, {}), (1.0, 10, None, RECOMPUTE)],
    ids=["all", "all recomputed", "half", "one layer", "layers recomputed"],
)
def test_equals_the_run_without_offload_bit_for_bit(case, fraction, segment_tokens, activation_tokens, settings):
    model, weights, samples, expected = case
    model, tree = replace(model, **settings), tree_config("dta", segment_tokens, activation_tokens)
    without, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    outcome, _ = run_tree(model, weights, samples, GRPO, replace(tree, kv_offload_fraction=fraction), TEMPERATURE)
    assert outcome.loss == without.loss
    for found, other in zip(outcome.logprobs, without.logprobs, strict=True):
        np.testing.assert_array_equal(found, other)
    for name, gradient in without.gradients.items():
        assert torch.equal(outcome.gradients[name], gradient), name
    assert compare_outcomes(outcome, expected).largest() < 1e-12


@pytest.mark.parametrize("fault", ["keys stay", "gradients stay", "gradients vanish"])
def test_a_lost_copy_would_be_seen(case, fault, monkeypatch):
    """The control of the tests above: what is not copied, or copied although nothing was left there, ends in NaN or in
    another gradient."""
    model, weights, samples, expected = case
    if fault == "gradients vanish":
        begin = OffloadedKVPool.begin

        def forget(pool, runs, descending):
            pool._has_gradients[:] = False
            begin(pool, runs, descending)

        monkeypatch.setattr(OffloadedKVPool, "begin", forget)
    else:
        store, index = OffloadedKVPool._store, fault == "gradients stay"

        def drop(pool, buffer, copies, slots):
            is_gradient = copies[0][0] is pool._on_host[buffer.layer].grad_keys
            return store(pool, buffer, [] if is_gradient == index else copies, slots)

        monkeypatch.setattr(OffloadedKVPool, "_store", drop)
    tree = replace(tree_config("dta", 6), kv_offload_fraction=1.0)
    try:
        outcome, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    except (ValueError, RuntimeError):
        return
    assert not compare_outcomes(outcome, expected).largest() < 1e-4


def test_layers_on_the_host_are_spread_over_the_depth():
    assert layers_on_host(12, 0.5) == [1, 3, 5, 7, 9, 11]
    assert layers_on_host(5, 1.0) == [0, 1, 2, 3, 4]
    assert layers_on_host(5, 0.2) == [2]
    assert layers_on_host(5, 0.0) == layers_on_host(0, 1.0) == []
    assert [layers_on_device(12, share) for share in (0, 0.05, 0.5, 1)] == [12, 12, 8, 2]
