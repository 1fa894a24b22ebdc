"""Mixture of experts on one process: the tree against the stock model, one sequence at a time, router included."""

from dataclasses import replace

import pytest
import torch

from megatron_dta.extras.parity import compare_outcomes, run_tree
from moe_cases import BALANCED_MODELS, CUTS, make_reference
from tree_attention_cases import poisoned_memory
from tree_engine_cases import GRPO, TEMPERATURE, check_trained_siblings, tree_config


@pytest.fixture(scope="module")
def references() -> dict:
    return {name: make_reference(name) for name in BALANCED_MODELS}


@pytest.mark.parametrize(
    ("name", "cut", "is_grouped"),
    [("deepseek-balanced", cut, True) for cut in CUTS]
    + [(name, CUTS[4], True) for name in BALANCED_MODELS if name != "deepseek-balanced"]
    + [(name, CUTS[5], False) for name in ("deepseek-balanced", "gpt")],
    ids=str,
)
def test_equals_stock_megatron_in_float64(references, name, cut, is_grouped):
    """Experts as grouped products, or one by one."""
    model, weights, samples, expected = references[name]
    model = replace(model, moe_grouped_gemm=is_grouped)
    with poisoned_memory():
        outcome, _ = run_tree(model, weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    assert {name for name in weights if not name.endswith("expert_bias")} == outcome.gradients.keys()
    assert all(gradient.abs().max() > 0 for gradient in outcome.gradients.values())
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sibling_changes_no_bit_of_another_sequence(references, dtype):
    # All experts take all tokens: the sizes of matrix products stay, and with them the rounding of other rows.
    model = replace(references["gpt"][0], params_dtype=dtype)
    weights = {name: weight.to(dtype) for name, weight in references["gpt"][1].items()}
    check_trained_siblings(model, weights, (4, 16))
