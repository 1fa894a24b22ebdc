"""Whole layers as one autograd function against the same layers made of modules: every output and every gradient."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from fused_layers_cases import fused
from main_grad_cases import DIRECT, Wrapped
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.experts import direct_routing
from megatron_dta.core.model.layers import fused_autograd_layer
from megatron_dta.core.model.layers.fused_autograd_layer import FusedAutogradLayer
from megatron_dta.extras.parity import random_training_samples
from moe_cases import DEEPSEEK_BALANCED, QWEN3_MOE
from tree_attention_cases import poisoned_memory
from tree_engine_cases import LLAMA, QWEN2, QWEN3, TEMPERATURE, branching_sequences, tree_config, weights_of
from triton_device import DEVICE, kernels_run

BIASED = {"disable_bias_linear": False, "qk_layernorm": True}
FULL = {"recompute_granularity": "full"}
EXPERTS = QWEN3_MOE | {"num_experts": 4}
BEFORE = EXPERTS | {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5}
# Routing by sigmoid, in groups, with biases and auxiliary losses, beside a dense layer.
BALANCED = DEEPSEEK_BALANCED | {"moe_shared_expert_intermediate_size": None}


def wrapped_with_kernels(*arguments: object) -> Wrapped:
    """``Wrapped`` whose attention runs on the Triton kernels too."""
    wrapped = Wrapped(*arguments)
    wrapped.engine = TreeEngine(wrapped.optimizer.chunks, TEMPERATURE, 5, tree_attention_impl="triton")
    return wrapped


class Counted:
    """How often layers went the direct way, and whether they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.passes, takes = True, 0, FusedAutogradLayer.takes

        def counted(layer: FusedAutogradLayer, *arguments: object) -> bool:
            is_taken = self.allowed and takes(layer, *arguments)
            self.passes += is_taken
            return is_taken

        monkeypatch.setattr(FusedAutogradLayer, "takes", counted)


@pytest.fixture
def counted(monkeypatch) -> Counted:
    return Counted(monkeypatch)


def both_ways(
    counted: Counted, model: ModelConfig, parallel: ParallelConfig, longest: int = 6, **tree: object
) -> list[tuple]:
    """``(logprobs, gradients)`` of a step, by modules and directly."""
    samples = random_training_samples(
        branching_sequences(seed_all(51), count=6 + longest // 20, longest=longest), seed=51
    )
    weights = weights_of(replace(model, fused_layer_impl="reference"), seed=3)
    settings = {"mode": "dta", "segment_tokens": 11} | tree
    outcomes = []
    for counted.allowed in (False, True):
        wrapped = wrapped_with_kernels(model, weights, parallel)
        tree = tree_config(**settings)
        with poisoned_memory():
            gradients = wrapped.gradients(samples, tree)
            logprobs = wrapped.engine.compute_logprobs(prepare_batch(samples, tree))
        assert (counted.passes > 0) == counted.allowed
        assert all(layer.direct is not None for layer in wrapped.model.decoder.layers)
        outcomes.append((logprobs, gradients))
    return outcomes


@kernels_run
@pytest.mark.parametrize(
    ("settings", "tree", "dtype"),
    [
        (QWEN3, {}, torch.float32),
        (QWEN2, {"mode": "packed", "segment_tokens": 25, "activation_tokens": 13}, torch.float32),
        (BIASED, {"activation_tokens": 0}, torch.float16),
        (LLAMA | FULL, {}, torch.float32),
        (BEFORE, {"activation_tokens": 0}, torch.float16),
        (BALANCED, {"activation_tokens": 13}, torch.float32),
    ],
    ids=["kept", "packed", "recomputed", "full", "recomputed experts", "balanced experts"],
)
def test_equals_the_modules(counted, settings, tree, dtype):
    check_equal(both_ways(counted, fused(dtype, **settings), DIRECT, **tree), 1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA GPU here")
@pytest.mark.parametrize(
    ("settings", "activation_tokens"), [(QWEN3, None), (QWEN3, 0), (EXPERTS, None), (BALANCED, 0)],
    ids=["dense", "dense recomputed", "experts", "balanced experts recomputed"],
)  # fmt: skip
def test_equals_the_modules_on_the_kernels_of_training(counted, settings, activation_tokens):
    shape = dict(hidden_size=256, ffn_hidden_size=768, num_attention_heads=4, kv_channels=128)
    tree = {"segment_tokens": 190, "activation_tokens": activation_tokens, "longest": 300}
    model = fused(torch.bfloat16, **settings | shape, max_position_embeddings=512)
    check_equal(both_ways(counted, model, DIRECT, **tree), 2e-2)


def check_equal(outcomes: list[tuple], tolerance: float) -> None:
    """All bits but those of the norms' and routers' weights, which modules round to the weight's dtype for each
    segment."""
    (logprobs, expected), (direct_logprobs, direct) = outcomes
    for stock, other in zip(logprobs, direct_logprobs, strict=True):
        assert (stock == other).all()
    assert direct.keys() == expected.keys()
    for name, gradient in expected.items():
        if "norm" not in name and "router" not in name:
            assert torch.equal(direct[name], gradient), name
        assert (direct[name] - gradient).norm() <= tolerance * gradient.norm(), name


@kernels_run
def test_what_is_not_added_is_missing(counted, monkeypatch):
    """The control of the test above."""
    for module in (fused_autograd_layer, direct_routing):
        monkeypatch.setattr(module, "add_weight_gradient", lambda *_: None)
    missing = ("linear_qkv", "linear_proj", "router")
    (_, expected), (_, actual) = both_ways(counted, fused(**EXPERTS), DIRECT)
    wrong = {key for key, gradient in expected.items() if (actual[key] - gradient).norm() > 1e-2 * gradient.norm()}
    assert wrong == {
        key for key in expected if "layers." in key and "norm" not in key and any(part in key for part in missing)
    }


@kernels_run
def test_frozen_weights_and_hooks_go_through_the_modules(counted):
    samples = random_training_samples(branching_sequences(seed_all(53), count=6, longest=8), seed=53)
    model, tree = fused(**QWEN3), tree_config("dta", 13)
    weights = weights_of(model, seed=3)
    wrapped_with_kernels(model, weights, DIRECT, "linear_fc1").gradients(samples, tree)
    wrapped, calls = wrapped_with_kernels(model, weights, DIRECT), []
    wrapped.gradients(samples, tree)
    before = counted.passes
    assert before
    of_modules = [(layer, layer.mlp.linear_fc2) for layer in wrapped.model.decoder.layers]
    for number in (0, 1):  # of the layer itself, and of a module in it
        hooks = [modules[number].register_forward_hook(lambda *_: calls.append(1)) for modules in of_modules]
        wrapped.gradients(samples, tree)
        assert counted.passes == before
        assert calls
        calls.clear()
        for hook in hooks:
            hook.remove()


@kernels_run
def test_weights_that_moved_between_steps_are_found(counted):
    samples = random_training_samples(branching_sequences(seed_all(54), count=6, longest=8), seed=54)
    model, tree = fused(**EXPERTS), tree_config("dta", 13)
    wrapped = wrapped_with_kernels(model, weights_of(model, seed=3), DIRECT)
    before = wrapped.gradients(samples, tree)
    for parameter in wrapped.model.parameters():
        old, parameter.data = parameter.data, parameter.data.clone()
        old.fill_(float("nan"))
    after = wrapped.gradients(samples, tree)
    assert counted.passes
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())
