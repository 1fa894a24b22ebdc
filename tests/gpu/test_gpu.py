"""Training steps on a GPU: the CPU's gradients, also in bfloat16, and none that a sibling changes."""

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from precision import tree_over_dense
from tree_engine_cases import (
    GRPO,
    QWEN2,
    QWEN3,
    TEMPERATURE,
    branching_sequences,
    check_trained_siblings,
    model_config,
    tree_config,
    weights_of,
)


@pytest.mark.parametrize("settings", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("activation_tokens", [None, 0], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("mode", "segment_tokens"), [("dense", 16), ("packed", 50), ("dta", 7)])
def test_equals_stock_megatron_in_float64(settings, mode, segment_tokens, activation_tokens):
    samples = random_training_samples(branching_sequences(seed_all(61)), seed=61)
    model = model_config(**settings)
    weights = weights_of(model, seed=5)
    expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    tree = tree_config(mode, segment_tokens, activation_tokens)
    outcome, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


def test_bfloat16_tree_is_as_near_to_float32_as_bfloat16_dense():
    """The mean over batches is not above 1 but by chance (two standard errors)."""
    ratios = tree_over_dense(range(70, 90))
    error = np.std(ratios, ddof=1) / len(ratios) ** 0.5
    print(f"distance of the tree over dense: mean {np.mean(ratios):.4f}, standard error {error:.4f}, {ratios}")
    assert np.mean(ratios) <= 1 + 2 * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sibling_changes_no_bit_of_another_sequence(dtype):
    model = model_config(dtype, **QWEN3)
    weights = weights_of(model, seed=8)
    check_trained_siblings(model, weights, (4, 16, 200))
