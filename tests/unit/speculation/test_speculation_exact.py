"""Speculation in the in-process engine gives the samples of plain decoding, token for token, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.model.attention.paged_cache import PagedCache
from megatron_dta.sampling.engines.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from rollout_forest import NEVER, SETTINGS, Drive, assert_same, run_forest, run_long, started
from sampling_cases import EOS, SHAPES, make_model, random_prompts
from speculation_exact_cases import Adversary, answers_of, suffix_drafting

GROUPED = SHAPES["grouped queries, QK-norm, untied"]


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "mixed", "suffix"])
def test_a_forest_of_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of held requests, ends of sequence inside drafts, length caps, pools that preempt, poisoned pages."""
    seed_all(len(kind))
    model = make_model(3, **GROUPED)
    grow = PagedCache.grow

    def grow_poisoned(cache: PagedCache, num_pages: int) -> None:
        first = cache.num_pages
        grow(cache, num_pages)
        for tensor in (*cache.keys.values(), *cache.values.values()):
            tensor[first:] = 1e3 * torch.randn_like(tensor[first:])

    monkeypatch.setattr(PagedCache, "grow", grow_poisoned)
    drive = Drive(seed=12)
    reference = run_forest(started(model), drive)
    all_settings = list(enumerate(SETTINGS.values()))
    for number, settings in all_settings if kind == "mixed" else all_settings[::2]:
        drafting = suffix_drafting() if kind == "suffix" else Adversary(kind, answers_of(reference), number)
        engine = started(model, **settings, drafting=drafting)
        found = run_forest(engine, replace(drive, order=number))
        assert_same(found, reference, 1e-12)
        statistics = engine.statistics()
        assert engine.pages_in_use == 0
        assert statistics["decoded_tokens"] == sum(len(result.token_ids) for _, result in found.values())
        if kind == "wrong":
            assert statistics["accepted_drafts"] == 0
        if kind == "right" and settings.get("max_tokens", 100) > 50 and "pages" not in settings:
            assert statistics["accepted_drafts"] > 0.5 * statistics["decoded_tokens"]
        if kind != "suffix":
            assert statistics["drafted_tokens"] == drafting.drafted > 0
            assert statistics["accepted_drafts"] == drafting.accepted


@pytest.mark.parametrize("kind", ["right", "random", "suffix"])
def test_preempted_requests(kind: str) -> None:
    model = make_model(14, **GROUPED)
    reference = run_long(started(model, NEVER))
    for settings in (dict(block_size=1, pages=65, max_tokens=8), dict(block_size=4, pages=30, max_requests=7)):
        drafting = suffix_drafting() if kind == "suffix" else Adversary(kind, answers_of(reference))
        engine = started(model, NEVER, **settings, drafting=drafting)
        assert_same(run_long(engine), reference, 1e-12)
        assert engine.statistics()["peak_pages"] <= settings["pages"]
        assert engine.pages_in_use == 0


@pytest.mark.parametrize(
    ("temperature", "top_p", "seed"), [(0.0, 1.0, 0), (0.6, 1.0, 1), (1.0, 1.0, 2), (1.0, 0.9, 3), (0.6, 0.9, 4)]
)
def test_five_thousand_sequences_in_float32(temperature: float, top_p: float, seed: int) -> None:
    """Over the five cases: 5,600 sequences of repeated prompts over several steps, in the order of training."""
    seed_all(seed)
    model = make_model(20 + seed, torch.float32, num_layers=2)
    params = SamplingParams(1, EOS, temperature, top_p, seed=5, other_eos_ids=(3,))
    prompts = random_prompts(np.random.default_rng(seed), [1, 5, 9, 14] * 7)
    drafting = suffix_drafting()
    plain, engine = started(model, params), started(model, params, drafting=drafting)
    steps, compared, texts = 5, 0, []
    depth = drafting.speculator.drafter.params.depth
    for step in range(steps):
        requests = [
            GenerationRequest(i * 8 + j, prompt, 14 + i % 9, i * 8 + j)
            for i, prompt in enumerate(prompts)
            for j in range(8)
        ]
        for each in (plain, engine):
            each.start(params, step)
            each.update_weights(step)
        expected, found = generate(plain, requests), generate(engine, requests)
        for one, other in zip(expected, found, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.finish_reason == other.finish_reason
            assert np.allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-5)
        compared += len(requests)
        rows = zip(requests, found, strict=True)
        texts += [[*request.token_ids[1 - depth :], *result.token_ids] for request, result in rows]
    assert compared == 1120
    statistics = engine.statistics()
    assert statistics["accepted_drafts"] > 0.01 * statistics["decoded_tokens"]
    assert statistics["drafted_tokens"] > statistics["accepted_drafts"]
    assert statistics["forwards"] < plain.statistics()["forwards"]
    assert drafting.speculator.drafter.num_samples == compared
    # The trees have what was sampled, and nothing of a draft besides.
    state = drafting.speculator.drafter.state_dict()
    stored = np.split(state["tokens"], np.cumsum(state["lengths"])[:-1])[int(state["num_prompts"]) :]
    assert sorted(text.tolist() for text in stored) == sorted(texts)


def test_an_error_leaves_drafts_and_pages_empty() -> None:
    model = make_model(7)
    drafting = suffix_drafting()
    engine = started(model, NEVER, drafting=drafting)
    prompts = random_prompts(np.random.default_rng(1), [4] * 6)
    requests = [GenerationRequest(i, prompt, 9, i) for i, prompt in enumerate(prompts)]
    clean = generate(engine, requests)
    drafter = drafting.speculator.drafter
    before = drafter.num_samples, drafter.stored_tokens
    engine.submit([replace(request, max_tokens=20) for request in requests])
    with torch.no_grad():
        weight = model.output_weight()
        kept = weight.clone()
        weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        engine.poll()
    with torch.no_grad():
        weight.copy_(kept)
    assert engine.pages_in_use == 0
    # Of those given up nothing stays in the trees.
    assert (drafter.num_samples, drafter.stored_tokens) == before
    assert before[0] == len(requests)
    engine.start(NEVER, 4)
    again = generate(engine, requests)
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in clean]
