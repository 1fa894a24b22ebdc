"""LoRA in every tree mode against the stock model whose weights hold the adapters, one sequence at a time, float64."""

from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from lora_cases import is_adapter, lora_config, lora_weights
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.config.checks.lora import check_lora
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.layers.lora import adapters_of, without_adapters
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from tree_engine_cases import GRPO, QWEN2, QWEN3, TEMPERATURE, branching_sequences, tree_config

GPT = {"disable_bias_linear": False, "normalization": "LayerNorm", "swiglu": False}
FULL_RECOMPUTE = {"recompute_granularity": "full"}
EXPERTS = {"num_experts": 3, "moe_ffn_hidden_size": 16, "moe_layer_freq": "[0,1]", "moe_aux_loss_coeff": 0.1}
BIASES = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MODELS = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "gpt": GPT,
    "recompute": QWEN3 | FULL_RECOMPUTE,
    "experts": EXPERTS,
    "grouped experts": EXPERTS | {"moe_router_topk": 2, "moe_router_pre_softmax": False},
    # The last layer's K and V, and the first layer's, have no adapter before them.
    "fc2": {"lora_target_modules": ["linear_fc2"]},
    "attention": QWEN3 | EXPERTS | {"lora_target_modules": ["linear_proj", "linear_qkv"]},
}
CUTS = [("dense", 9, 12), ("packed", 45, None), ("dta", 6, 0), ("dta", 1000, None)]


@pytest.fixture(scope="module")
def references():
    """Samples, weights and the outcome of training each sequence alone for each kind of model, computed once."""
    samples = random_training_samples(branching_sequences(seed_all(23), count=6, longest=12), seed=23)
    outcomes = {}
    for name, settings in MODELS.items():
        model = lora_config(**settings)
        weights = lora_weights(model, seed=5)
        outcomes[name] = model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE)
    return outcomes


@pytest.mark.parametrize(
    ("name", "mode", "segment_tokens", "activation_tokens"),
    [*(("qwen3", *cut) for cut in CUTS), *((name, *cut) for name in MODELS if name != "qwen3" for cut in CUTS[1:3])],
)
def test_equals_adapted_weights_of_the_stock_model(references, name, mode, segment_tokens, activation_tokens):
    model, weights, samples, expected = references[name]
    tree = tree_config(mode, segment_tokens, activation_tokens)
    outcome, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    assert outcome.gradients.keys() == {name for name in weights if is_adapter(name)}
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


def test_a_wrong_scale_is_noticed(references):
    model, weights, samples, expected = references["qwen3"]
    outcome, _ = run_tree(replace(model, lora_alpha=5.1), weights, samples, GRPO, tree_config("dta", 9), TEMPERATURE)
    assert compare_outcomes(outcome, expected).largest() > 1e-4


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", torch.bfloat16), ("experts", torch.float32), ("grouped experts", torch.bfloat16)]
)
def test_a_new_model_and_one_without_its_adapters_are_the_base_bit_for_bit(name, dtype):
    samples = random_training_samples(branching_sequences(seed_all(29), count=6, longest=12), seed=29)
    plain = lora_config(dtype, **MODELS[name], lora_rank=None, lora_alpha=None)
    base = build_model(plain, initialize_parallel(7))
    adapted = build_model(lora_config(dtype, **MODELS[name]), initialize_parallel(7))
    base_weights = {name: values for name, values in adapted.state_dict().items() if not is_adapter(name)}
    for key, values in base.state_dict().items():
        assert values is None or torch.equal(base_weights[key], values), key
    batch = prepare_batch(samples, tree_config("dta", 9))
    expected = TreeEngine(base).compute_logprobs(batch)
    new = TreeEngine(adapted).compute_logprobs(batch)
    with torch.no_grad():
        for adapter in adapters_of([adapted]):
            adapter.lora_B.normal_()
    trained = TreeEngine(adapted).compute_logprobs(batch)
    with without_adapters(adapted.model_chunks):
        reference = TreeEngine(adapted).compute_logprobs(batch)
    for values, fresh, moved, off in zip(expected, new, trained, reference, strict=True):
        assert (values == fresh).all()
        assert (values == off).all()
        assert (values != moved).any()


@pytest.mark.parametrize(
    ("model", "parallel", "reason"),
    [
        (EXPERTS | BIASES, {}, "--moe-router-bias-update-rate 0"),
        (EXPERTS, {"tensor_model_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
        ({}, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttL"}, "stage 0 has no layer"),
    ],
)
def test_what_cannot_be_adapted_is_refused(model, parallel, reason):
    with pytest.raises(InputError, match=reason):
        check_lora(lora_config(**model), ParallelConfig(**parallel))
