"""``--batch-invariant-mode``: bits of logprobs do not depend on what else is computed, in sampler and trainer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import seed_all
from dta_kernels.invariant.products import InvariantProduct, is_batch_invariant, product, row_sums, set_batch_invariant
from megatron_dta.core.config import ObjectiveConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.decode.paged_context import HeadShape
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from rollout_forest import PARAMS, Drive, run_forest, started, trainers_logprobs
from sampling_cases import SHAPES, make_model
from speculation_exact_cases import Adversary, answers_of
from triton_device import interpreter

GROUPED = SHAPES["grouped queries, QK-norm, untied"]
MODELS = {
    "tied": SHAPES["tied, one head size"],
    "experts": GROUPED
    | dict(add_qkv_bias=True, disable_bias_linear=True, num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=20),
}
SETTINGS = (
    dict(block_size=4, max_tokens=9), dict(block_size=16, max_requests=4), dict(block_size=5, max_tokens=33, pages=40),
)  # fmt: skip


@pytest.fixture(autouse=True)
def the_mode_ends() -> Iterator[None]:
    yield
    set_batch_invariant(False)


@pytest.mark.parametrize(("shape", "dtype"), [("experts", torch.bfloat16), ("tied", torch.float32)], ids=str)
def test_sampler_and_trainer_agree_bit_for_bit(shape: str, dtype: torch.dtype):
    """For engines that cut prompts and batches differently, and for segments of all sizes."""
    seed_all(len(shape))
    model = make_model(3, dtype, batch_invariant_mode=True, **MODELS[shape])
    assert is_batch_invariant()
    drive = Drive(seed=len(shape), prompts=2, longest=16, depth=1)
    results = run_forest(started(model, **SETTINGS[0]), drive)
    assert len(results) > 10
    for number, settings in enumerate((*SETTINGS[1:], dict(drafting=Adversary("mixed", answers_of(results), 1)))):
        engine = started(model, **settings)
        assert_same_bits(results, run_forest(engine, replace(drive, order=number + 1)))
    assert engine.statistics()["accepted_drafts"] > 20
    sampled = [result.logprobs for _, result in results.values()]
    for tokens in (7, 512):
        trained = trainers_logprobs(model, results, TreeConfig(tree_segment_tokens=tokens))
        assert all(map(np.array_equal, trained, sampled))
    few = dict(list(results.items())[::5])
    trained = trainers_logprobs(model, few, TreeConfig(tree_mode="dense"))
    assert all(map(np.array_equal, trained, sampled[::5]))
    assert gap_while_training(model, results) == 0


def gap_while_training(model: Any, results: dict, impl: str = "auto") -> float:
    """The largest difference in the pass with gradients."""
    samples = []
    for number, (request, result) in enumerate(results.values()):
        token_ids = np.concatenate([request.token_ids, result.token_ids])
        is_sampled = np.arange(len(token_ids)) >= len(request.token_ids)
        logprobs = np.concatenate([np.zeros(len(request.token_ids)), result.logprobs])
        samples.append(
            TrainingSample(
                token_ids, is_sampled, advantages=np.full(len(token_ids), number % 3 - 1.0), rollout_logprobs=logprobs
            )
        )
    engine = TreeEngine(model, temperature=PARAMS.temperature, logprob_chunk_tokens=50, tree_attention_impl=impl)
    batch = prepare_batch(samples, TreeConfig(tree_segment_tokens=40))
    step = engine.forward_backward(batch, make_objective(ObjectiveConfig()))
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    return float(step.metrics["sampler_logprob_gap_max"])


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_and_passes_at_fixed_addresses_agree_bit_for_bit(dtype: torch.dtype):
    seed_all(5)
    shape = GROUPED | dict(num_layers=1, fused_layer_impl="triton", disable_bias_linear=True, kv_channels=16)
    model = make_model(3, dtype, batch_invariant_mode=True, **shape)
    drive, kernels = Drive(seed=17, prompts=1, longest=16, depth=1), dict(attention_impl="triton")
    results = run_forest(started(model, **kernels, max_tokens=11), drive)
    drafting = Adversary("mixed", answers_of(results), 1)
    engine = started(model, **kernels, static_passes=True, drafting=drafting, block_size=3)
    assert_same_bits(results, run_forest(engine, replace(drive, order=1)))
    assert engine.statistics()["static_forwards"] > 0 < engine.statistics()["accepted_drafts"]
    assert gap_while_training(model, results, "triton") == 0


def assert_same_bits(results: dict, others: dict) -> None:
    assert results.keys() == others.keys()
    for number, (_, result) in results.items():
        assert np.array_equal(result.token_ids, others[number][1].token_ids)
        assert np.array_equal(result.logprobs, others[number][1].logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_of_a_product_do_not_depend_on_their_number(dtype: torch.dtype):
    seed_all(1)
    set_batch_invariant(True)
    x, weight = torch.randn(70, 33).to(dtype), torch.randn(21, 33).to(dtype)
    rows = product(x, weight)
    assert torch.allclose(rows.double(), x.double() @ weight.double().t(), rtol=1e-2, atol=1e-2)
    for begin, end in ((0, 1), (3, 40), (11, 44), (69, 70)):
        assert torch.equal(product(x[begin:end], weight), rows[begin:end])
    assert product(x[:0], weight).shape == (0, 21)


def test_only_without_the_mode_settings_of_attention_follow_the_number_of_sequences():
    shape = HeadShape(16, 8, 128, torch.bfloat16)
    assert shape.config(1, 16) != shape.config(1, 256)
    set_batch_invariant(True)
    assert shape.config(1, 16) == shape.config(1, 256)


def test_a_row_has_the_sum_that_it_has_beside_others():
    set_batch_invariant(True)
    seed_all(1)
    x, threads = torch.randn(16, 70_001).exp(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(row_sums(x), torch.cat([row_sums(row) for row in x.split(1)]))
        torch.testing.assert_close(row_sums(x), x.sum(-1))
    finally:
        torch.set_num_threads(threads)


def test_the_product_has_gradients():
    set_batch_invariant(True)
    x, weight = (torch.randn(size, 7, dtype=torch.float64, requires_grad=True) for size in (5, 3))
    assert torch.autograd.gradcheck(InvariantProduct.apply, (x, weight))
