"""Mixture of experts on one process: the tree against the stock model, one sequence at a time, router included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.parity import compare_outcomes, random_training_samples, run_huggingface, run_tree
from megatron_dta.parity.huggingface import to_huggingface
from moe_cases import (
    CUTS,
    DEEPSEEK_BALANCED,
    MODELS,
    QWEN3_BALANCED,
    make_reference,
)
from tree_engine_cases import GRPO, TEMPERATURE, tree_config

MODELS |= {"qwen3-balanced": QWEN3_BALANCED, "deepseek-balanced": DEEPSEEK_BALANCED}


@pytest.fixture(scope="module")
def references() -> dict:
    return {name: make_reference(name) for name in MODELS}


@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, cut) for name in ("qwen3", "deepseek-balanced") for cut in CUTS]
    + [
        (name, cut)
        for name in MODELS
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
    generator = seed_all(31)
    trunk = generator.integers(0, 7, size=21)
    tails = [np.append([first], generator.integers(0, 7, size=n)) for first, n in ((0, 12), (1, 9), (2, 30))]
    changed = [tails[0], np.append([1], (tails[1][1:] + 1) % 7), tails[2]]
    for segment_tokens in (4, 16):
        before, after = (
            run_tree(
                model,
                weights,
                random_training_samples([np.append(trunk, tail).astype(np.int32) for tail in branches], seed=1),
                GRPO,
                tree_config("dta", segment_tokens),
            )[0].logprobs
            for branches in (tails, changed)
        )
        assert not np.array_equal(before[1], after[1])
        for sequence in (0, 2):
            assert np.array_equal(before[sequence], after[sequence])
