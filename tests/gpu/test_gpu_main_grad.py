"""Weight gradients written directly to float32 buffers on a GPU: correct, repeatable, without waiting, small."""

from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from dta_kernels.logprobs.linear import linear_logprobs
from linear_logprobs_cases import chunks_of
from main_grad_cases import (
    BY_AUTOGRAD,
    DIRECT,
    MODELS,
    Wrapped,
    distance,
    no_waiting,
    test_bfloat16_weights_lose_nothing_between_segments,  # noqa: F401  runs here too
)
from megatron_dta.core.engine import prepare_batch
from megatron_dta.extras.parity import random_training_samples
from tree_engine_cases import GRPO, QWEN3, branching_sequences, model_config, tree_config, weights_of

GIB = 2**30


@pytest.mark.parametrize("name", MODELS)
def test_equals_autograd_in_float64(name):
    samples = random_training_samples(branching_sequences(seed_all(31), count=9, longest=30), seed=31)
    model = model_config(**MODELS[name])
    weights = weights_of(model, seed=4)
    expected = Wrapped(model, weights, BY_AUTOGRAD).gradients(samples, tree_config("dta", 7, 12))
    assert distance(Wrapped(model, weights, DIRECT).gradients(samples, tree_config("dta", 7, 12)), expected) < 1e-12


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_same_bit_for_bit_and_never_waits(dtype, overlap):
    samples = random_training_samples(branching_sequences(seed_all(81), count=40, longest=90), seed=81)
    model = model_config(dtype, hidden_size=128, ffn_hidden_size=256, kv_channels=64, **QWEN3)
    parallel = replace(DIRECT, overlap_grad_reduce=overlap, ddp_bucket_size=5000 if overlap else None)
    wrapped = Wrapped(model, weights_of(model, seed=4), parallel)
    batch, found = prepare_batch(samples, tree_config("dta", 16, 48)), []
    for attempt in range(3):
        wrapped.optimizer.zero_grad()
        # The first run may load kernels, which waits; Megatron's reductions may too, so it is without them.
        wrapped.engine.forward_backward(batch, GRPO, forbid_synchronization=attempt > 0 and not overlap)
        wrapped.optimizer.reduce_gradients()
        found.append([p.main_grad.clone() for p in wrapped.model.parameters()])
    for again in found[1:]:
        assert all(torch.equal(first, second) for first, second in zip(found[0], again, strict=True))
    exact = replace(model, params_dtype=torch.float32)
    weights = {name: p.detach().float() for name, p in wrapped.model.named_parameters()}
    wanted = Wrapped(exact, weights, BY_AUTOGRAD).gradients(samples, tree_config("dta", 16, 48))
    names = [name for name, _ in wrapped.model.named_parameters()]
    error = distance(dict(zip(names, found[0], strict=True)), wanted)
    assert error < (0.1 if dtype == torch.bfloat16 else 1e-3), error


def test_memory_of_the_logprob_op():
    """Under 1 GiB beside its inputs and the buffer, forward and backward, at the largest vocabulary in use."""
    seed_all(1)
    rows, vocabulary, width = 4096, 151_936, 2048
    hidden = (torch.randn(rows, width, device="cuda") / width**0.5).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16))
    buffer = torch.zeros(vocabulary, width, device="cuda")
    edge_row, target = torch.arange(rows), torch.randint(0, vocabulary, (rows,))
    chunks = chunks_of(rows, edge_row, (1 << 27) // vocabulary)
    edge_row, target = edge_row.cuda(), target.cuda()
    gradients = torch.randn(rows, device="cuda"), torch.randn(rows, device="cuda")

    def run(into: torch.Tensor | None) -> None:
        outputs = linear_logprobs(hidden, weight, edge_row, target, chunks, 0.9, weight_grad_VC=into)
        torch.autograd.grad(outputs, (hidden, weight), gradients)

    peaks = {}
    for name, into in (("buffer", buffer), ("autograd", None)):
        run(into)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with no_waiting():
            run(into)
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / GIB
        print(f"logprob op, {name}: {peaks[name]:.3f} GiB")
    assert peaks["buffer"] < 0.4
    assert peaks["autograd"] > 1
