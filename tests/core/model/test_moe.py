"""Mixture of experts on one process: the tree against the stock model, one sequence at a time, router included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_dta.extras.parity import compare_outcomes, run_huggingface, run_tree
from megatron_dta.extras.parity.huggingface import to_huggingface
from moe_cases import BALANCED_MODELS, CUTS, make_reference
from tree_engine_cases import GRPO, TEMPERATURE, check_siblings, siblings, tree_config


@pytest.fixture(scope="module")
def references() -> dict:
    return {name: make_reference(name) for name in BALANCED_MODELS}


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in ("qwen3", "deepseek-balanced") for cut in CUTS]
    + [
        (name, cut)
        for name in BALANCED_MODELS
        for cut in (CUTS[0], CUTS[3], CUTS[4])
        if name not in ("qwen3", "deepseek-balanced")
    ],
    ids=str,
)
def test_equals_stock_megatron_in_float64(references, name, cut):
    model, weights, samples, expected = references[name]
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    assert {name for name in weights if not name.endswith("expert_bias")} == outcome.gradients.keys()
    assert all(gradient.abs().max() > 0 for gradient in outcome.gradients.values())
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.parametrize("cut", [("dense", 16), ("packed", 50), ("dta", 8)], ids=str)
def test_equals_hugging_face_in_float32(references, name, cut):
    pytest.importorskip("transformers", reason="the Hugging Face reference needs transformers (extra 'test')")
    model, weights, samples, _ = references[name]
    single = replace(model, params_dtype=torch.float32)
    single_weights = {key: weight.float() for key, weight in weights.items()}
    expected = run_huggingface(single, single_weights, samples, GRPO, TEMPERATURE)
    outcome, _ = run_tree(single, single_weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    renamed = replace(outcome, gradients=to_huggingface(outcome.gradients, single))
    errors = compare_outcomes(renamed, expected)
    assert errors.largest() < 1e-5, errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sibling_changes_no_bit_of_another_sequence(references, dtype):
    # All experts take all tokens: the sizes of matrix products stay, and with them the rounding of other rows.
    model = replace(references["gpt"][0], params_dtype=dtype)
    weights = {name: weight.to(dtype) for name, weight in references["gpt"][1].items()}
    for segment_tokens in (4, 16):
        before, after = (
            run_tree(model, weights, siblings(changed), GRPO, tree_config("dta", segment_tokens))[0].logprobs
            for changed in (False, True)
        )
        check_siblings(before, after)
