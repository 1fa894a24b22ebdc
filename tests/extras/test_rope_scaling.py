"""Scaled rotary positions: frequencies bit for bit as transformers computes them, models equal far beyond the original
length, trees and sampling like the stock model.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, TreeConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.model.rotary import inverse_frequencies, rotary_tables
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from megatron_dta.extras.parity.huggingface import empty_huggingface, run_huggingface, to_huggingface
from megatron_dta.training.huggingface.config.config import model_settings

VOCABULARY = 11
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 3.3},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    "yarn, length of the model": {"type": "yarn", "factor": 3.0},
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 33,
        "attention_factor": 1.37,
    },
    "yarn, everything": {
        "rope_type": "yarn",
        "factor": 6.7,
        "original_max_position_embeddings": 47,
        "beta_fast": 9.0,
        "beta_slow": 0.7,
        "mscale": 0.8,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
}


def config_json(scaling: dict | None, theta: float = 10000.0, head_size: int = 16, length: int = 160) -> dict:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_size,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": True,
    }


def model_of(config: dict, dtype: torch.dtype = torch.float32) -> ModelConfig:
    return ModelConfig(**{**model_settings(config), "init_method_std": 0.3, "params_dtype": dtype})


def attention_factor(model: ModelConfig) -> float:
    """The factor on cosine and sine, as the flags' help says."""
    if model.position_embedding_type != "yarn":
        return 1.0
    grown, divisor = (
        0.1 * mscale * math.log(model.rotary_scaling_factor) + 1 for mscale in (model.mscale, model.mscale_all_dim)
    )
    return grown / divisor


def weights_of(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    device = initialize_parallel(seed)
    weights = {name: p.detach().clone() for name, p in build_model(model, device).named_parameters()}
    for name, weight in weights.items():
        if weight.ndim == 1:  # biases and norms are not random when a model is made
            weights[name] = weight + 0.3 * torch.randn_like(weight)
    return weights


@pytest.mark.parametrize(("theta", "head_size"), [(12345.678, 16), (500000.0, 128)])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_have_the_bits_of_transformers(name, head_size, theta):
    scaling = SCALINGS[name]
    if scaling is not None and head_size == 128:  # lengths of real models
        scaling = {key: value * 173 if "original" in key else value for key, value in scaling.items()}
    config = config_json(scaling, theta, head_size, length=32768 if head_size == 128 else 160)
    rotary = empty_huggingface(config).model.rotary_emb
    frequencies = inverse_frequencies(model_of(config))
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, rotary.inv_freq)
    assert attention_factor(model_of(config)) == pytest.approx(rotary.attention_scaling, rel=1e-14)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn, everything"])
def test_trees_agree_with_the_stock_model_and_transformers(name):
    generator = seed_all(17)
    config = config_json(SCALINGS[name])
    double, single = model_of(config, torch.float64), model_of(config)
    weights = {name: weight.double() for name, weight in weights_of(single, seed=4).items()}
    trunk = generator.integers(0, VOCABULARY, size=70)
    sequences = [
        np.append(trunk[: generator.integers(1, 71)], generator.integers(0, VOCABULARY, size=generator.integers(1, 60)))
        for _ in range(7)
    ]
    samples = random_training_samples(sequences, seed=5)
    grpo = make_objective(ObjectiveConfig(objective="grpo", kl_loss_coef=0.05, entropy_coef=0.02))
    tree = TreeConfig(tree_mode="dta", tree_segment_tokens=23)
    outcome, _ = run_tree(double, weights, samples, grpo, tree)
    assert compare_outcomes(outcome, run_stock(double, weights, samples, grpo)).largest() < 1e-12
    in_single = {name: weight.float() for name, weight in weights.items()}
    outcome, _ = run_tree(single, in_single, samples, grpo, tree)
    renamed = replace(outcome, gradients=to_huggingface(outcome.gradients, single))
    assert compare_outcomes(renamed, run_huggingface(single, in_single, samples, grpo)).largest() < 1e-5


def test_an_impossible_scaling_is_refused():
    shape = dict(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=5)
    initialize_parallel(0)
    with pytest.raises(InputError, match="must not be above"):
        build_model(ModelConfig(**shape, position_embedding_type="yarn", yarn_beta_slow=33.0), torch.device("cpu"))


@pytest.mark.parametrize("name", ["llama3", "yarn", "yarn, attention factor"])
def test_angles_have_the_bits_of_transformers_up_to_a_million_positions(name):
    positions = torch.tensor([0, 1, 131_071, 524_287, 999_999, (1 << 20) - 1])
    config = config_json(SCALINGS[name] | {"original_max_position_embeddings": 32768}, 5e6, length=1 << 20)
    built = build_model(model_of(config), initialize_parallel(0))
    tables = rotary_tables(built.rotary_pos_emb(1 << 20).index_select(0, positions), built.config)
    rotary = empty_huggingface(config).model.rotary_emb
    expected = rotary(torch.zeros(1, 1, dtype=torch.float32), positions[None])
    for table, other in zip(tables, expected, strict=True):
        assert torch.equal(table, other[0, :, : table.shape[1]])
