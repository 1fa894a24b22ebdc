"""K, V and their gradients on the host: the same loss, logprobs and gradients, bit for bit."""

from dataclasses import replace
from functools import partial
from math import ceil

import numpy as np
import pytest
import torch

from conftest import assert_equal_tensors, seed_all
from fused_layers_cases import fused
from main_grad_cases import DIRECT, Wrapped
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import StepPart, TreeEngine, prepare_batch
from megatron_dta.core.model.attention.kv_pool import SlotShape
from megatron_dta.core.model.build import build_model
from megatron_dta.core.objectives.weights import count_trained
from megatron_dta.core.planning.costs.gpus import gpu_named, least_offload_tokens
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes, layers_on_device, layers_on_host
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.extras.kv_offload.copy_speed import check_copies
from megatron_dta.extras.kv_offload.pool import HostSlots, OffloadedKVPool, _Buffer
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of
from triton_device import interpreter


@pytest.fixture(scope="module")
def case():
    """A model of five layers, its weights, samples, and the outcome of one sequence at a time."""
    model = model_config(**QWEN3, num_layers=5)
    weights = weights_of(model, seed=5)
    samples = random_training_samples(branching_sequences(seed_all(11), count=6, longest=14), seed=11)
    return model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Whatever a buffer or the host holds before it is written is NaN, and a buffer loses its layer at every reuse."""
    memory, take = HostSlots.memory, _Buffer.take

    def take_poisoned(buffer, layer, runs):
        for tensor in buffer.slots:
            if tensor is not None:
                tensor.fill_(float("nan"))
        take(buffer, layer, runs)

    # Bytes of 255 are NaN in every floating-point type.
    monkeypatch.setattr(HostSlots, "memory", lambda *arguments: memory(*arguments).fill_(255))
    monkeypatch.setattr(_Buffer, "take", take_poisoned)


RECOMPUTE = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    ("fraction", "segment_tokens", "activation_tokens", "settings"),
    [(1.0, 6, 0, {}), (0.5, 10, 12, {}), (1.0, 10, None, RECOMPUTE)],
    ids=["all recomputed", "half", "layers recomputed"],
)
def test_equals_the_run_without_offload_bit_for_bit(case, fraction, segment_tokens, activation_tokens, settings):
    model, weights, samples, expected = case
    model, tree = replace(model, **settings), tree_config("dta", segment_tokens, activation_tokens)
    without, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    outcome, _ = run_tree(model, weights, samples, GRPO, replace(tree, kv_offload_fraction=fraction), TEMPERATURE)
    assert outcome.loss == without.loss
    for logprobs, other in zip(outcome.logprobs, without.logprobs, strict=True):
        np.testing.assert_array_equal(logprobs, other)
    assert_equal_tensors(outcome.gradients, without.gradients)
    assert compare_outcomes(outcome, expected).largest() < 1e-12


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_a_rank_without_sequences(case, fraction):
    model = build_model(case[0], torch.device("cpu"))
    engine = TreeEngine(model)
    engine.offload_kv(fraction)
    batch = prepare_batch([], tree_config("dta", 6), part=StepPart(count_trained([3, 4])))
    assert engine.compute_logprobs(batch) == []
    assert float(engine.forward_backward(batch, GRPO).loss) == 0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@interpreter
def test_the_kernels_of_training_see_the_same_slots():
    """Layers as one function: the keys are written to the slots by the kernel that rotates them."""
    model = fused(**QWEN3)
    weights = weights_of(replace(model, fused_layer_impl="reference"), seed=3)
    samples = random_training_samples(branching_sequences(seed_all(51), count=6, longest=8), seed=51)
    gradients = []
    for fraction in (0.0, 1.0):
        wrapped = Wrapped(model, weights, DIRECT)
        wrapped.engine = TreeEngine(wrapped.optimizer.chunks, TEMPERATURE, 5, tree_attention_impl="triton")
        wrapped.engine.offload_kv(fraction)
        gradients.append(wrapped.gradients(samples, tree_config("dta", 6)))
    assert all(gradient.isfinite().all() for gradient in gradients[0].values())
    assert_equal_tensors(gradients[1], gradients[0])


@pytest.mark.parametrize("fault", ["keys stay", "gradients stay", "gradients vanish"])
def test_a_lost_copy_would_be_seen(case, fault, monkeypatch):
    """The control of the tests above: what is not copied, or copied although nothing was left there, ends in NaN or in
    another gradient."""
    model, weights, samples, expected = case
    if fault == "gradients vanish":
        begin = OffloadedKVPool.begin

        def forget(pool, runs, descending):
            pool._has_gradients[:] = False
            begin(pool, runs, descending)

        monkeypatch.setattr(OffloadedKVPool, "begin", forget)
    else:
        store, index = OffloadedKVPool._store, fault == "gradients stay"

        def drop(pool, buffer, copies, slots):
            is_gradient = copies[0][0] is pool._on_host[buffer.layer].grad_keys
            return store(pool, buffer, [] if is_gradient == index else copies, slots)

        monkeypatch.setattr(OffloadedKVPool, "_store", drop)
    tree = replace(tree_config("dta", 6), kv_offload_fraction=1.0)
    try:
        outcome, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    except (ValueError, RuntimeError):
        return
    assert not compare_outcomes(outcome, expected).largest() < 1e-4


def test_layers_on_the_host_are_spread_over_the_depth():
    assert layers_on_host(12, 0.5) == [1, 3, 5, 7, 9, 11]
    assert layers_on_host(5, 1.0) == [0, 1, 2, 3, 4]
    assert layers_on_host(5, 0.2) == [2]
    assert layers_on_host(5, 0.0) == layers_on_host(0, 1.0) == []
    assert [layers_on_device(12, share) for share in (0, 0.05, 0.5, 1)] == [12, 12, 8, 2]


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_the_pool_takes_the_bytes_that_are_counted(fraction):
    shape = DecoderShape(5, 64, 128, 8, 4, 16, 100)
    segment_bytes = SegmentBytes.of_shape(shape, RankTensors(4, kv_offload_fraction=fraction))
    host = HostSlots(fraction, torch.device("cpu"))
    sizes = dict(num_slots=7, slot=SlotShape(4, 16, 16), dtype=torch.float32, device=torch.device("cpu"))
    pool = OffloadedKVPool(host, 0, 5, **sizes, with_gradients=True)
    held = (pool.keys_LSGD, pool.values_LSGD, pool.grad_keys_LSGD, pool.grad_values_LSGD, *pool.gathered)
    assert sum(tensor.nbytes for tensor in held) == 7 * segment_bytes.slot(5)
    assert host.memory(0, 0).untyped_storage().nbytes() == 7 * segment_bytes.host_slot(5)


def test_segments_too_short_to_hide_the_copies_are_refused(case, monkeypatch):
    """Heads of Qwen3-8B: 4,096 channels of queries and 1,024 of keys."""
    h200, is_known = gpu_named("NVIDIA H200")
    assert is_known
    least = least_offload_tokens(h200, 1.0, (4096, 1024), 2)
    backward = 2.5 * 4 * 4096 / 989e12 / 0.457  # seconds of a pair of a token and a key
    assert least == pytest.approx(2 * 1024 * (2 + 8) / (0.8 * 64e9) / backward)
    assert least_offload_tokens(h200, 0.5, (4096, 1024), 2) == pytest.approx(least / 2)
    engine = TreeEngine(build_model(case[0], torch.device("cpu")))
    engine.offload_kv(1.0)
    assert check_copies(engine, None) == []  # a CPU computes and copies in turn
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    assumed = least_offload_tokens(h200, 1.0, (2, 1), 8)  # of the data sheet: in float64
    refused = f"--kv-offload-fraction 1: at 51.2 GB/s .assumed for H200. .* give --tree-segment-tokens {ceil(assumed)} "
    with pytest.raises(InputError, match=refused):
        check_copies(engine, 64, None)
    assert len(check_copies(engine, ceil(assumed), None)) == 1
    # At half the rate segments must be twice as long, or half the layers be on the host.
    slow = partial(check_copies, engine, ceil(assumed), lambda _: 0.4 * h200.host)
    with pytest.raises(InputError, match=rf"at 25.6 GB/s .measured. .* {ceil(2 * assumed)} .* to 0.5 or less"):
        slow()
    with pytest.raises(InputError, match="give --tree-segment-tokens"):
        check_copies(engine, None, lambda _: 1e12)
    told, warning = slow(continues=True)
    assert "copied at 25.6 GB/s (measured)" in told
    assert warning.startswith("warning: --kv-offload-fraction 1")
    # Rates vary from start to start.
    assert len(check_copies(engine, ceil(assumed), lambda _: 0.75 * h200.host)) == 1
