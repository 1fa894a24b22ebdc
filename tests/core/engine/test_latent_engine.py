"""Latent attention on trees equals Megatron's own layer one sequence at a time, in every mode."""

from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from latent_cases import ADAPTERS, MODELS, latent_weights
from lora_cases import is_adapter
from main_grad_cases import BY_AUTOGRAD, DIRECT, Wrapped, distance
from megatron_dta.core.model.attention.kv_pool import KVPool
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from megatron_dta.families.latent_attention import path_attention, sizes
from megatron_dta.training.config.derived.lora_sizes import adapter_parameters
from tree_engine_cases import GRPO, TEMPERATURE, branching_sequences, check_trained_siblings, model_config, tree_config
from triton_device import interpreter

ADAPTED = {f"{name}, adapters": settings | ADAPTERS for name, settings in MODELS.items()}
# In the first layer nothing before it has a gradient but the input.
ADAPTED["one adapter"] = MODELS["moonlight"] | ADAPTERS | dict(lora_target_modules=["linear_kv_up_proj"])
CUTS = [("dense", 9), ("packed", 45, 0), ("dta", 1, 12), ("dta", 6), ("dta", 6, 0)]
IN_TURNS = ("dta", 12)


def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, heads attend in groups of 2 to more than 4 keys, and one by one to more than 8."""
    monkeypatch.setattr(sizes, "_MOST_EXPANDED", 16 * 2 * 10 * 16)
    monkeypatch.setattr(sizes, "_LEAST_HEADS", 1)
    monkeypatch.setattr(path_attention, "_BLOCK", 5 * 2 * 10)


@pytest.fixture(scope="module")
def references():
    samples = random_training_samples(branching_sequences(seed_all(13), count=6, longest=10), seed=13)
    cases = {}
    for name, settings in (MODELS | ADAPTED).items():
        model = model_config(**settings)
        weights = latent_weights(model, seed=5)
        cases[name] = (model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE))
    return cases


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in MODELS | ADAPTED for cut in (CUTS if name == "deepseek" else (CUTS[1], CUTS[3]))]
    + [(name, IN_TURNS) for name in ("deepseek", "deepseek, adapters", "one adapter")],
    ids=str,
)
def test_equals_one_sequence_at_a_time_in_float64(references, name, cut, monkeypatch):
    if cut == IN_TURNS:
        in_turns(monkeypatch)
    model, weights, samples, expected = references[name]
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    trained = {n for n in weights if (is_adapter(n) if model.lora_rank else "expert_bias" not in n)}
    assert outcome.gradients.keys() == expected.gradients.keys() == trained
    assert adapter_parameters(model) in (0, sum(weights[n].numel() for n in trained))
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


def test_a_sibling_changes_no_bit_of_another_sequence():
    model = model_config(torch.bfloat16, **MODELS["experts"])
    weights = latent_weights(model, seed=8)
    check_trained_siblings(model, weights, (4, 200))


@pytest.mark.parametrize("name", ["moonlight", "experts"])
def test_gradients_in_megatrons_buffers_are_those_of_autograd(references, name, monkeypatch):
    """The expansion's weight is used within a backward, in a graph of its own."""
    in_turns(monkeypatch)
    model, weights, samples, _ = references[name]
    tree = tree_config("dta", 6, 12)
    expected = Wrapped(model, weights, BY_AUTOGRAD).gradients(samples, tree)
    assert distance(Wrapped(model, weights, DIRECT).gradients(samples, tree), expected) < 1e-12


@interpreter
def test_kernels_agree_with_plain_pytorch_in_float32(references, monkeypatch):
    samples = references["deepseek"][2]
    model = model_config(torch.float32, **MODELS["deepseek"])
    weights = latent_weights(model, seed=5)
    expected, _ = run_tree(model, weights, samples, GRPO, tree_config("dta", 6), TEMPERATURE)
    kernels = replace(model, fused_layer_impl="triton")
    in_turns(monkeypatch)
    for segment_tokens in (6, 40):
        tree = tree_config("dta", segment_tokens, tree_attention_impl="triton")
        outcome, _ = run_tree(kernels, weights, samples, GRPO, tree, TEMPERATURE)
        assert compare_outcomes(outcome, expected).largest() < 1e-5


def test_a_lost_gradient_would_be_seen(references, monkeypatch):
    """The control of the tests above: without the gradients that descendants leave, the error is large."""
    model, weights, samples, expected = references["deepseek"]
    begin = KVPool.begin

    def forgetful(pool: KVPool, runs: object, descending: bool) -> None:
        begin(pool, runs, descending)
        if descending:
            pool.grad_keys_LSGD.zero_()

    monkeypatch.setattr(KVPool, "begin", forgetful)
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config("dta", 6), TEMPERATURE)
    errors = compare_outcomes(outcome, expected)
    assert errors.logprob < 1e-12
    assert errors.gradient > 1e-4
