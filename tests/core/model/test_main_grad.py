"""Weight gradients that go straight into Megatron's buffers, against those that autograd makes: one process."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from main_grad_cases import (
    BY_AUTOGRAD,
    DIRECT,
    MODELS,
    Wrapped,
    distance,
    test_bfloat16_weights_lose_nothing_between_segments,  # noqa: F401  runs here too
)
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.parity import random_training_samples, run_tree
from tree_attention_cases import poisoned_memory
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of

CASES = [
    *(("tied", *cut) for cut in [("dense", 9, None), ("packed", 30, 0), ("dta", 7, 12)]),
    *(("untied", "dta", 9, 0), ("biases", "dta", 6, None), ("experts", "dta", 7, 12), ("experts", "packed", 30, 0)),
]


def test_buffers_without_their_hooks_are_refused():
    model = build_model(model_config(**QWEN3), initialize_parallel(0), DIRECT)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    engine = TreeEngine(model, TEMPERATURE, 5)
    samples = random_training_samples(branching_sequences(seed_all(5), count=6, longest=8), seed=5)
    batch = prepare_batch(samples, tree_config("dta", 6))
    assert batch.plan.segments.num_segments > 1
    with pytest.raises(RuntimeError, match="keep its DistributedDataParallel"):
        engine.forward_backward(batch, GRPO)


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple]:
    samples = random_training_samples(branching_sequences(seed_all(21), count=6, longest=9), seed=21)
    models = {name: model_config(**settings) for name, settings in MODELS.items()}
    return {name: (model, weights_of(model, seed=9), samples) for name, model in models.items()}


@pytest.mark.parametrize(("name", "mode", "segment_tokens", "activation_tokens"), CASES)
def test_equals_autograd_in_float64(cases, name, mode, segment_tokens, activation_tokens):
    model, weights, samples = cases[name]
    tree = tree_config(mode, segment_tokens, activation_tokens)
    expected = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)[0].gradients
    wrapped = Wrapped(model, weights, DIRECT)
    with poisoned_memory():
        assert distance(wrapped.gradients(samples, tree), expected) < 1e-12
    twice = {name: 2 * gradient for name, gradient in expected.items()}
    assert distance(wrapped.gradients(samples, tree, steps=2), twice) < 1e-12
    by_autograd = Wrapped(model, weights, BY_AUTOGRAD)
    assert distance(by_autograd.gradients(samples, tree), expected) < 1e-12
    direct = {name for name, p in wrapped.model.named_parameters() if p.grad_added_to_main_grad}
    weights_of_maps = {name for name in expected if name.endswith("weight") and "norm" not in name}
    # Grouped experts write to their buffers in a pass of which autograd does not know (``direct_run``).
    assert direct == {name for name in weights_of_maps if "router" not in name and "local_experts" not in name}
    assert not any(p.grad_added_to_main_grad for p in by_autograd.model.parameters())


@pytest.mark.parametrize("frozen", ["linear_qkv", "word_embeddings", "output_layer"])
def test_frozen_weights_stay_out(cases, frozen):
    model, weights, samples = cases["untied"]
    tree = tree_config("dta", 7, 12)
    unfrozen = Wrapped(model, weights, BY_AUTOGRAD).gradients(samples, tree)
    expected = {name: gradient for name, gradient in unfrozen.items() if frozen not in name}
    assert len(expected) < len(unfrozen)
    assert distance(Wrapped(model, weights, DIRECT, frozen).gradients(samples, tree), expected) < 1e-12


@pytest.mark.parametrize(
    ("name", "recompute"), [("tied", True), ("untied", False), ("biases", True), ("experts", False)]
)
def test_a_weight_is_ready_once_and_whole(cases, name, recompute):
    """When the step's last backward says that a gradient may be reduced, nothing more is added to it."""
    model, weights, samples = cases[name]
    if recompute:
        full = {"recompute_granularity": "full"}
        model = replace(model, **full)
    wrapped = Wrapped(model, weights, replace(DIRECT, overlap_grad_reduce=True, ddp_bucket_size=900))
    tree, ready = tree_config("dta", 7), []
    wrapped.gradients(samples, tree)
    wrapped.optimizer.reduce_gradients()
    for group in wrapped.optimizer.chunks[0].bucket_groups:
        group.register_grad_ready = functools.partial(_note, ready, group, group.register_grad_ready)
    wrapped.gradients(samples, tree)
    last = [(parameter, gradient) for parameter, gradient, is_last in ready if is_last]
    assert len(last) == len(list(wrapped.model.parameters())) < len(ready)
    assert len({id(parameter) for parameter, _ in last}) == len(last)
    assert all(torch.equal(parameter.main_grad, gradient) for parameter, gradient in last)


def _note(ready: list, group: object, register: Callable, parameter: torch.nn.Parameter, *more: object) -> None:
    ready.append((parameter, parameter.main_grad.clone(), group.is_last_microbatch))
    register(parameter, *more)
