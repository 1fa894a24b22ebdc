"""Trees equal Hugging Face's models of the same weights in float32: dense, hybrid, and with experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face reference needs transformers (extra 'test')")

from conftest import seed_all
from hybrid_cases import EXPERTS, HYBRID, spread
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_tree
from megatron_dta.extras.parity.huggingface import run_huggingface, to_huggingface
from moe_cases import MIXTRAL, QWEN3_MOE
from tree_engine_cases import (
    GRPO,
    LLAMA,
    QWEN2,
    QWEN3,
    TEMPERATURE,
    branching_sequences,
    model_config,
    tree_config,
    weights_of,
)

MODELS = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
    "qwen3.5": HYBRID,
    "qwen3-next": HYBRID | EXPERTS,
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_hugging_face_in_float32(name: str) -> None:
    samples = random_training_samples(branching_sequences(seed_all(13), count=8, longest=24), seed=13)
    model = model_config(**MODELS[name])
    weights = weights_of(model, seed=5)
    weights = spread(weights, seed=3) if "linear_attention_freq" in MODELS[name] else weights
    single = replace(model, params_dtype=torch.float32)
    weights = {key: weight.float() for key, weight in weights.items()}
    expected = run_huggingface(single, weights, samples, GRPO, TEMPERATURE)
    for mode, segment_tokens in (("dense", 24), ("dta", 8)):
        outcome, _ = run_tree(single, weights, samples, GRPO, tree_config(mode, segment_tokens), TEMPERATURE)
        errors = compare_outcomes(replace(outcome, gradients=to_huggingface(outcome.gradients, single)), expected)
        assert errors.largest() < 1e-5, (mode, errors)
