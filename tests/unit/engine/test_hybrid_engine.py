"""Hybrid models on trees equal the same model one sequence at a time, token by token, in every mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_cases import EXPERTS, HYBRID
from megatron_dta.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from conftest import seed_all
from tree_engine_cases import (
    GRPO,
    TEMPERATURE,
    VOCABULARY,
    branching_sequences,
    check_siblings,
    model_config,
    siblings,
    tree_config,
    weights_of,
)


def spread(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The weights with norms and decay away from their initial values, which could hide a lost factor."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
    return weights


@pytest.fixture(scope="module")
def references():
    samples = random_training_samples(branching_sequences(seed_all(11), count=14), seed=11)
    found = {}
    for name, settings in (("dense", HYBRID), ("experts", HYBRID | EXPERTS)):
        model = model_config(**settings)
        weights = spread(weights_of(model, seed=5), seed=3)
        found[name] = (model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE))
    return found


@pytest.mark.parametrize("activation_tokens", [None, 12, 0], ids=["kept", "mixed", "recomputed"])
@pytest.mark.parametrize(
    ("mode", "segment_tokens"), [("dense", 9), ("packed", 45), ("dta", 1), ("dta", 6), ("dta", 1000)]
)
def test_equals_one_sequence_at_a_time_in_float64(references, mode, segment_tokens, activation_tokens):
    model, weights, samples, expected = references["dense"]
    outcome, _ = run_tree(
        model, weights, samples, GRPO, tree_config(mode, segment_tokens, activation_tokens), TEMPERATURE
    )
    assert outcome.gradients.keys() == weights.keys()
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


def test_with_experts(references):
    model, weights, samples, expected = references["experts"]
    for mode, segment_tokens, activation_tokens in (("dta", 7, None), ("dta", 7, 0), ("packed", 50, None)):
        tree = tree_config(mode, segment_tokens, activation_tokens)
        outcome, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
        errors = compare_outcomes(outcome, expected)
        assert errors.largest() < 1e-12, errors
