"""Trees equal Hugging Face's models of the same weights in float32; relative errors between outcomes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import latent_cases
from conftest import seed_all
from hybrid_cases import EXPERTS, HYBRID, NEMOTRON, spread
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_tree
from megatron_dta.extras.parity.huggingface import run_huggingface, to_huggingface
from megatron_dta.extras.parity.outcome import Outcome
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

pytest.importorskip("transformers", reason="the Hugging Face reference needs transformers (extra 'test')")


MODELS = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
    "nemotron-h": NEMOTRON,
    "qwen3.5": HYBRID,
    "qwen3-next": HYBRID | EXPERTS,
    **{f"latent {name}": settings for name, settings in latent_cases.MODELS.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_hugging_face_in_float32(name: str) -> None:
    samples = random_training_samples(branching_sequences(seed_all(13), count=6, longest=10), seed=13)
    model = model_config(**MODELS[name])
    weights = (latent_cases.latent_weights if name.startswith("latent") else weights_of)(model, seed=5)
    weights = spread(weights, seed=3) if "mixer" in MODELS[name] and not name.startswith("latent") else weights
    single = replace(model, params_dtype=torch.float32)
    weights = {key: weight.float() for key, weight in weights.items()}
    expected = run_huggingface(single, weights, samples, GRPO, TEMPERATURE)
    outcome, _ = run_tree(single, weights, samples, GRPO, tree_config("dta", 6), TEMPERATURE)
    errors = compare_outcomes(replace(outcome, gradients=to_huggingface(outcome.gradients, single)), expected)
    assert errors.largest() < 1e-5, errors


def outcome(loss: float = 2.0, **gradients: list[float]) -> Outcome:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in gradients.items()}
    return Outcome(loss, [np.array([-1.0, -4.0]), np.array([-2.0])], tensors)


def test_each_parameter_has_its_own_scale() -> None:
    exact = outcome(large=[100.0, 1.0], small=[1e-9, 2e-9])
    errors = compare_outcomes(outcome(large=[100.0, 1.5], small=[1e-9, 3e-9]), exact)
    assert (errors.gradient, errors.worst_parameter) == (pytest.approx(0.5), "small")
    errors = compare_outcomes(outcome(loss=2.5, large=[100.0, 1.0], small=[1e-9, 2e-9]), exact)
    assert (errors.loss, errors.logprob, errors.gradient) == (pytest.approx(0.25), 0.0, 0.0)


@pytest.mark.parametrize("rounding", [0.0, 3e-16])
def test_what_is_zero_but_for_rounding_is_compared_with_the_largest(rounding: float) -> None:
    exact = outcome(large=[1.0], zero=[rounding, -rounding])
    assert compare_outcomes(outcome(large=[1.0], zero=[2e-16, 0.0]), exact).gradient < 1e-15
    errors = compare_outcomes(outcome(large=[1.0], zero=[1e-6, 0.0]), exact)
    assert (errors.gradient, errors.worst_parameter) == (pytest.approx(1e-6), "zero")


def test_what_is_broken_does_not_pass() -> None:
    exact = outcome(large=[1.0], small=[0.1])
    assert compare_outcomes(outcome(large=[1.0]), exact).gradient == 1.0
    assert math.isnan(compare_outcomes(outcome(large=[math.nan], small=[0.1]), exact).gradient)
    assert math.isnan(compare_outcomes(outcome(loss=math.nan, large=[1.0], small=[0.1]), exact).loss)
    nothing = outcome(loss=0.0, large=[0.0])
    assert compare_outcomes(nothing, nothing).largest() == 0.0
    assert compare_outcomes(outcome(loss=0.0, large=[1e-9]), nothing).gradient == math.inf
