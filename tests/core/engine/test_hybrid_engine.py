"""Hybrid models on trees equal the same model one sequence at a time, token by token, in every mode."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from hybrid_cases import EXPERTS, HYBRID, NEMOTRON, NEMOTRON_EXPERTS, spread
from lora_cases import LORA, is_adapter, lora_weights
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.engine.stage_run import StageRun
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.hybrid.segment_states import SegmentPathStates
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from megatron_dta.training.config.derived.lora_sizes import adapter_parameters
from precision import tree_over_dense
from tree_engine_cases import (
    GRPO,
    TEMPERATURE,
    branching_sequences,
    check_trained_siblings,
    model_config,
    tree_config,
    weights_of,
)

CUTS = (("dense", 9), ("packed", 30, 0), ("dta", 1, 12), ("dta", 6), ("dta", 6, 0))
_MODELS = {"dense": HYBRID, "experts": HYBRID | EXPERTS, "mamba": NEMOTRON, "mamba-experts": NEMOTRON_EXPERTS}
_MODELS |= {"adapters": HYBRID | LORA, "mamba-adapters": NEMOTRON | LORA}
RUNS = [*(("dense", cut) for cut in CUTS), *(("mamba", cut) for cut in (*CUTS[:3], CUTS[4]))]
RUNS += [(name, cut) for name in ("adapters", "mamba-adapters") for cut in (CUTS[1], CUTS[3])]
RUNS += [("dense", ("dta", 1000)), ("experts", ("packed", 40))]
RUNS += [(name, ("dta", 7, 0)) for name in ("experts", "mamba-experts")]


@pytest.fixture(scope="module")
def references():
    samples = random_training_samples(branching_sequences(seed_all(13), count=6, longest=9), seed=13)
    cases = {}
    for name, settings in _MODELS.items():
        model = model_config(**settings)
        weights = spread((lora_weights if model.lora_rank else weights_of)(model, seed=5), seed=3)
        cases[name] = (model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE))
    return cases


@pytest.mark.parametrize(("name", "cut"), RUNS, ids=str)
def test_equals_one_sequence_at_a_time_in_float64(references, name, cut):
    model, weights, samples, expected = references[name]
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    trained = {name for name in weights if is_adapter(name) or not model.lora_rank}
    assert outcome.gradients.keys() == trained
    assert adapter_parameters(model) in (0, sum(weights[name].numel() for name in trained))
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


@pytest.mark.parametrize("settings", [HYBRID, NEMOTRON], ids=["delta", "mamba"])
def test_a_sibling_changes_no_bit_of_another_sequence(settings):
    model = model_config(torch.bfloat16, **settings)
    weights = weights_of(model, seed=8)
    check_trained_siblings(model, weights, (4, 200))


def test_many_siblings_of_one_token_behind_the_first_one():
    """A fork at position 0 with 70 branches: runs of one token in one level, and in many segments."""
    sequences = [np.array([5, token], np.int32) for token in range(70)] + [np.array([5, 7, 7, 9], np.int32)]
    samples = random_training_samples(sequences, seed=4)
    model = model_config(vocab_size=128, **HYBRID)
    weights = spread(weights_of(model, seed=9), seed=1)
    expected = run_stock(model, weights, samples, GRPO)
    for segment_tokens, activation_tokens, least in ((40, 0, 35), (400, None, 70)):
        tree = tree_config("dta", segment_tokens, activation_tokens)
        widest = prepare_batch(samples, tree).plan.runs.widest_levels
        assert least <= widest.max() <= min(segment_tokens, 70)
        outcome, _ = run_tree(model, weights, samples, GRPO, tree)
        errors = compare_outcomes(outcome, expected)
        assert errors.largest() < 1e-12, errors


@pytest.mark.parametrize("lost", ["grad_states", "grad_rows"])
def test_a_lost_gradient_would_be_seen(references, lost, monkeypatch):
    """The control of the tests above: without the gradients that children leave at forks, the error is large."""
    model, weights, samples, expected = references["dense"]
    read = SegmentPathStates.entry_rows if lost == "grad_rows" else SegmentPathStates.entry_states
    # Both are called at the start of each backward, before the gradients at the forks are read.

    def forgetful(states: SegmentPathStates, layer: int, *arguments: torch.Tensor) -> torch.Tensor:
        if states.pool.grad_states is not None:
            getattr(states.pool, lost)[layer].zero_()
        return read(states, layer, *arguments)

    monkeypatch.setattr(SegmentPathStates, read.__name__, forgetful)
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config("dta", 6), TEMPERATURE)
    errors = compare_outcomes(outcome, expected)
    assert errors.logprob < 1e-12
    assert errors.gradient > 1e-4


def test_forks_are_kept_on_one_path_only(references):
    """The pool has as many slots as the plan says that one path needs, not one for each fork of the forest."""
    model, weights, *_ = references["dense"]
    samples = random_training_samples(branching_sequences(seed_all(13), count=8, longest=16), seed=13)
    batch = prepare_batch(samples, tree_config("dta", 6))
    runs = batch.plan.runs
    tree_model = build_model(model, torch.device("cpu"))
    tree_model.load_state_dict(weights)
    run = StageRun(TreeEngine(tree_model), batch, GRPO)
    pool = run.states[0].pool
    assert pool.states.shape == (2, runs.forks_in_flight.max(), 4, 6, 5)
    assert pool.rows.shape == (2, runs.forks_in_flight.max(), 3, 2 * 12 + 20)
    assert runs.forks_in_flight.max() < runs.open_forks.sum()
    assert pool.grad_states.dtype is pool.states.dtype is torch.float64
    half = TreeEngine(build_model(replace(model, params_dtype=torch.bfloat16), torch.device("cpu")))
    pool = StageRun(half, batch, GRPO).states[0].pool
    assert pool.grad_states.dtype is pool.states.dtype is pool.grad_rows.dtype is torch.float32
    assert pool.rows.dtype is torch.bfloat16


def test_a_hybrid_tree_is_as_near_to_float32_as_a_dense_one():
    """In the median, because in some batches a few tokens make nearly all of both distances."""
    heads = replace(HYBRID["mixer"], linear_key_head_dim=16, linear_value_head_dim=16)
    sizes = dict(hidden_size=64, ffn_hidden_size=96, kv_channels=16, mixer=heads)
    ratios = tree_over_dense(range(70, 73), count=7, **HYBRID | sizes)
    print(f"distance of the tree over dense: {ratios}")
    assert 0.9 < np.median(ratios) <= 1.01
