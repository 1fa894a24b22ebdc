"""Latent attention on a GPU: kernels against plain PyTorch, gradients in bfloat16, decoding against the trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from latent_cases import EXPERTS, WIDE, latent_weights
from megatron_dta.core.config import TreeConfig
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_tree
from megatron_dta.families.latent_attention import sizes
from precision import tree_over_dense
from rollout_forest import Drive, run_forest, started, trainers_logprobs
from sampling_cases import make_model
from tree_engine_cases import GRPO, TEMPERATURE, branching_sequences, check_trained_siblings, model_config, tree_config


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_kernels_agree_with_plain_pytorch_in_float32(experts, monkeypatch):
    samples = random_training_samples(branching_sequences(seed_all(62), count=30, longest=90), seed=62)
    model = model_config(torch.float32, **(WIDE | experts))
    weights = latent_weights(model, seed=5)
    plain = replace(model, fused_layer_impl="reference")
    tree = tree_config("dta", 33, tree_attention_impl="reference")
    expected, _ = run_tree(plain, weights, samples, GRPO, tree, TEMPERATURE)
    for segment_tokens, activation_tokens, most_expanded in ((33, None, 1 << 30), (128, 0, 0)):
        monkeypatch.setattr(sizes, "_MOST_EXPANDED", most_expanded)  # 0: two of the four heads at a time
        tree = tree_config("dta", segment_tokens, activation_tokens, tree_attention_impl="triton")
        outcome, _ = run_tree(replace(model, fused_layer_impl="triton"), weights, samples, GRPO, tree, TEMPERATURE)
        errors = compare_outcomes(outcome, expected)
        assert errors.largest() < 2e-4, errors


def test_bfloat16_tree_is_as_near_to_float32_as_bfloat16_dense():
    """The mean over batches is not above 1 but by chance (two standard errors)."""
    ratios = tree_over_dense(range(70, 90), **WIDE, qk_layernorm=False)
    error = np.std(ratios, ddof=1) / len(ratios) ** 0.5
    print(f"distance of the tree over dense: mean {np.mean(ratios):.4f}, standard error {error:.4f}, {ratios}")
    assert np.mean(ratios) <= 1 + 2 * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sibling_changes_no_bit_of_another_sequence(dtype):
    model = model_config(dtype, **(WIDE | EXPERTS))
    weights = latent_weights(model, seed=8)
    check_trained_siblings(model, weights, (4, 16, 200))


@pytest.mark.parametrize("static_passes", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_decoding_has_the_trainers_logprobs(dtype, tolerance, static_passes):
    shape = WIDE | dict(hidden_size=32, ffn_hidden_size=48, disable_bias_linear=True) | EXPERTS
    model = make_model(3, dtype, **shape)
    samples = run_forest(started(model, static_passes=static_passes), Drive(seed=3, prompts=2, longest=20))
    trained = trainers_logprobs(model, samples, TreeConfig(tree_segment_tokens=16))
    difference = max(
        np.abs(result.logprobs - expected).max()
        for (_, result), expected in zip(samples.values(), trained, strict=True)
    )
    print(f"{dtype}: the largest difference of a logprob is {difference:.2e}")
    assert difference < tolerance
