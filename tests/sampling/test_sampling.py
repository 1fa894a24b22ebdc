"""Sampling on the training weights: logprobs equal the trainer's, independent of the cache and of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.sampling.in_process import next_token as sampler_module
from megatron_dta.sampling.in_process.next_token import draw, first_argmax, nucleus
from megatron_dta.sampling.params import SamplingParams
from sampling_cases import (
    EOS,
    SHAPES,
    VOCAB,
    PlainContext,
    full_logprobs,
    generate,
    make_model,
    random_prompts,
    slow_draw,
    slow_nucleus,
    slow_sample,
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.8), (1.6, 0.5), (0.0, 1.0)])
def test_equals_sampling_with_the_whole_prefix_every_step(shape: str, temperature: float, top_p: float):
    rng = seed_all(len(shape))
    model = make_model(5, **SHAPES[shape])
    prompts = random_prompts(rng, [1, 7, 2, 13])
    params = SamplingParams(max_response_tokens=9, eos_id=EOS, temperature=temperature, top_p=top_p, seed=77)
    sequence_prompt, ids = np.array([0, 1, 1, 2, 3, 3, 0]), np.array([4, 0, 9, 2, 2**32 - 1, 3, 1])
    responses = generate(model, prompts, sequence_prompt, ids, params, iteration=3)
    for response, prompt, sequence_id in zip(responses, sequence_prompt, ids, strict=True):
        tokens, logprobs = slow_sample(model, prompts[prompt], int(sequence_id), params, 3)
        assert response.token_ids.tolist() == tokens
        assert np.allclose(response.logprobs, logprobs, rtol=0, atol=1e-12)
        assert response.ended == (tokens[-1] == EOS)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_logprobs_are_those_of_the_full_vocabulary(dtype: torch.dtype, tolerance: float, top_p: float):
    """Also with a nucleus: what is recorded is what the trainer computes, not the truncated distribution's."""
    rng = seed_all(13)
    model = make_model(6, dtype)
    prompts = random_prompts(rng, [5, 3])
    params = SamplingParams(max_response_tokens=20, eos_id=EOS, temperature=0.9, top_p=top_p)
    responses = generate(model, prompts, np.repeat([0, 1], 8), np.arange(16), params, 0)
    for response, prompt in zip(responses, np.repeat([0, 1], 8), strict=True):
        tokens = np.concatenate([prompts[prompt], response.token_ids])
        rows = full_logprobs(model, tokens, 0.9)[len(prompts[prompt]) - 1 : -1]
        expected = np.take_along_axis(rows, response.token_ids[:, None].astype(np.int64), 1)[:, 0]
        assert response.logprobs.dtype == expected.dtype
        assert np.abs(response.logprobs - expected).max() <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tree_mode", ["dta", "packed", "dense"])
def test_logprobs_are_the_tree_engines(tree_mode: str, dtype: torch.dtype, tolerance: float):
    """The loop's own invariant: at the sampler's weights, training finds every importance ratio to be 1."""
    rng = seed_all(37)
    model = make_model(18, dtype, num_query_groups=2)
    prompts = random_prompts(rng, [6, 1, 11])
    sequence_prompt = np.repeat([0, 1, 2], 6)
    params = SamplingParams(max_response_tokens=10, eos_id=EOS, temperature=0.8, top_p=0.9)
    responses = generate(model, prompts, sequence_prompt, np.arange(18), params, 0)
    samples = []
    for prompt, response in zip(sequence_prompt, responses, strict=True):
        token_ids = np.concatenate([prompts[prompt], response.token_ids])
        samples.append(TrainingSample(token_ids, np.arange(len(token_ids)) >= len(prompts[prompt])))
    tree = TreeConfig(tree_mode=tree_mode, tree_segment_tokens=24)
    engine = TreeEngine(model, temperature=0.8, logprob_chunk_tokens=7)
    logprobs = engine.compute_logprobs(prepare_batch(samples, tree))
    for sample, response, trained in zip(samples, responses, logprobs, strict=True):
        assert np.abs(trained[sample.loss_mask] - response.logprobs).max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sample_does_not_depend_on_the_batch(dtype: torch.dtype):
    rng = seed_all(17)
    model = make_model(8, dtype, init_method_std=0.1)
    prompts = random_prompts(rng, [4, 9, 1, 6])
    params = SamplingParams(max_response_tokens=12, eos_id=EOS, seed=5)
    sequence_prompt, ids = np.repeat(np.arange(4), 5), np.arange(20)
    together = generate(model, prompts, sequence_prompt, ids, params, 1)
    order = rng.permutation(20)
    permuted = generate(model, prompts[::-1], 3 - sequence_prompt[order], ids[order], params, 1)
    in_threes = generate(model, prompts, sequence_prompt, ids, SamplingParams(12, EOS, seed=5), 1, max_requests=3)
    assert len({tuple(response.token_ids) for response in together}) > 10
    for row, index in enumerate(order):
        assert permuted[row].token_ids.tolist() == together[index].token_ids.tolist()
    for index in range(20):
        assert in_threes[index].token_ids.tolist() == together[index].token_ids.tolist()
        if index % 3 == 0:
            alone = generate(model, [prompts[sequence_prompt[index]]], np.array([0]), ids[index : index + 1], params, 1)
            assert alone[0].token_ids.tolist() == together[index].token_ids.tolist()
    for other in (
        generate(model, prompts, sequence_prompt, ids, params, 2),
        generate(model, prompts, sequence_prompt, ids, SamplingParams(12, EOS, seed=6), 1),
        generate(model, prompts, sequence_prompt, ids, SamplingParams(12, EOS, seed=5, domain=Domain.EVALUATION), 1),
    ):
        assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(other, together, strict=True))


def test_long_prompts_in_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch):
    rng = seed_all(19)
    model = make_model(9)
    prompts = random_prompts(rng, [30, 1, 17, 8, 31])
    params = SamplingParams(max_response_tokens=4, eos_id=EOS)
    unbroken = generate(model, prompts, np.arange(5), np.arange(5), params, 0)
    for tokens in (1, 7, 40):
        monkeypatch.setattr(sampler_module, "_LOGIT_ELEMENTS", 2 * VOCAB)
        pieces = generate(model, prompts, np.arange(5), np.arange(5), params, 0, max_tokens=tokens)
        for a, b in zip(pieces, unbroken, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert np.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-12)


def test_samples_follow_the_models_distribution():
    """Chi-square of the first two tokens of 20,000 samples against the exact probabilities."""
    rng = seed_all(23)
    model = make_model(10, torch.float32, num_layers=1, vocab_size=5, init_method_std=0.15)
    prompt = rng.integers(0, 4, 3).astype(np.int32)
    count = 20_000
    params = SamplingParams(max_response_tokens=2, eos_id=4, temperature=1.3, seed=1)
    responses = generate(model, [prompt], np.zeros(count, int), np.arange(count), params, 0, max_requests=count)
    first = full_logprobs(model, prompt, 1.3)[-1]
    expected = {(4,): np.exp(first[4])}
    for a in range(4):
        second = full_logprobs(model, np.append(prompt, a), 1.3)[-1]
        expected |= {(a, b): np.exp(first[a] + second[b]) for b in range(5)}
    assert abs(sum(expected.values()) - 1) < 1e-5
    seen = dict.fromkeys(expected, 0)
    for response in responses:
        seen[tuple(response.token_ids.tolist())] += 1
    chi_square = sum((seen[key] - count * p) ** 2 / (count * p) for key, p in expected.items())
    freedom = len(expected) - 1
    assert min(expected.values()) * count > 5
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_end_of_sequence_and_length_cap(cap: int):
    """EOS as the very first token, later, and never; what is cut has exactly the cap's tokens and no EOS."""
    rng = seed_all(29)
    model = make_model(12)
    prompts = random_prompts(rng, [4, 2])
    params = SamplingParams(max_response_tokens=cap, eos_id=EOS, temperature=0)
    greedy = generate(model, prompts, np.array([0, 1]), np.arange(2), params, 0)
    for index, response in enumerate(greedy):
        assert len(response.token_ids) == cap
        for stop in range(cap):
            token = int(response.token_ids[stop])
            first = response.token_ids.tolist().index(token)
            again = generate(
                model, [prompts[index]], np.zeros(1, int), np.arange(1), SamplingParams(cap, token, temperature=0), 0
            )[0]
            assert again.ended
            assert again.token_ids.tolist() == response.token_ids[: first + 1].tolist()
            assert np.allclose(again.logprobs, response.logprobs[: first + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_nucleus_against_the_slow_twin(seed: int):
    rng = seed_all(100 + seed)
    for _ in range(60):
        size = int(rng.integers(1, 40))
        weights = rng.exponential(size=(3, size)) ** 3
        weights[:, rng.random(size) < 0.3] = weights[:, :1]  # equals, for the tie rule
        probabilities = weights / weights.sum(-1, keepdims=True)
        top_p = float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]))
        numbers = rng.random(3)
        kept = nucleus(torch.from_numpy(probabilities), top_p)
        drawn = draw(kept, torch.from_numpy(numbers))
        for row in range(3):
            expected = slow_nucleus(probabilities[row], top_p)
            assert np.array_equal(kept[row].numpy(), expected)
            assert int(drawn[row]) == slow_draw(expected, numbers[row])


def test_draw_never_takes_what_has_no_probability():
    weights = torch.tensor(
        [[0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0], [1e-300, 0.0, 0.0, 0.0, 0.0]]
    ).double()
    weights[2, 0] = 1e-300
    for number in (0.0, 0.25 - 2.0**-52, 0.25, 1 - 2.0**-52):
        drawn = draw(weights, torch.full((3,), number, dtype=torch.float64)).tolist()
        assert drawn == [1 if number < 0.25 else 3, 2, 0]


def test_greedy_takes_the_lowest_of_equals():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 3.0]])
    assert first_argmax(scores).tolist() == [1, 0, 3]


def test_the_model_is_left_as_it_was_and_can_be_trained():
    model = make_model(15)
    model.train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generate(model, [np.array([1, 2])], np.zeros(2, int), np.arange(2), SamplingParams(3, EOS), 0)
    assert model.training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    device = model.output_weight().device
    context = PlainContext(position_ids=torch.tensor([0], device=device))
    assert model(torch.tensor([[1]], device=device), context).requires_grad


def test_what_cannot_be_sampled_is_refused():
    model = make_model(16)
    zero = np.zeros(1, int)
    params = SamplingParams(max_response_tokens=90, eos_id=EOS)
    with pytest.raises(ValueError, match="--max-position-embeddings 96"):
        generate(model, [np.zeros(7, int)], zero, zero, params, 0)
    with pytest.raises(ValueError, match="empty"):
        generate(model, [np.zeros(0, int)], zero, zero, params, 0)
    with pytest.raises(ValueError, match="vocabulary"):
        generate(model, [np.array([VOCAB])], zero, zero, params, 0)
    for bad in (dict(max_response_tokens=0), dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_p=0.0)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**{"max_response_tokens": 1, "eos_id": 0, **bad})
    with torch.no_grad():
        model.output_weight()[3] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(model, [np.array([1])], zero, zero, SamplingParams(2, EOS), 0)
