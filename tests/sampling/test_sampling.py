"""Sampling on the training weights: logprobs equal the trainer's, independent of the cache and of the batch."""

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.common.keyed_random import Domain
from megatron_dta.sampling.in_process import next_token as sampler_module
from megatron_dta.sampling.in_process.next_token import draw, first_argmax, nucleus
from megatron_dta.sampling.params import SamplingParams
from sampling_cases import EOS, VOCAB, generate, make_model, random_prompts, slow_draw, slow_nucleus


def test_a_sample_does_not_depend_on_the_batch():
    rng = seed_all(17)
    model = make_model(8, torch.float32, init_method_std=0.1)
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
