"""Speculation in the in-process engine gives the samples of plain decoding, token for token, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.model.paged_cache import PagedCache
from megatron_dta.sampling.engines.drafting import Drafting, SuffixDrafting
from megatron_dta.sampling.engines.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.speculation.budgets import BudgetParams
from megatron_dta.speculation.drafter import DrafterParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.speculator import Speculator
from megatron_dta.speculation.suffix_forest import DraftParams
from rollout_forest import NEVER, SETTINGS, Drive, assert_same, run_forest, run_long, started
from sampling_cases import EOS, SHAPES, VOCAB, make_model, random_prompts

GROUPED = SHAPES["grouped queries, QK-norm, untied"]


class Adversary(Drafting):
    """Drafts that are right, wrong or random: what a request will sample is known by (its context, its key)."""

    def __init__(self, kind: str, answers: dict, seed: int = 0) -> None:
        self.kind, self.answers, self.rng = kind, answers, np.random.default_rng(seed)
        self.drafted = self.accepted = 0

    def submitted(self, sequence) -> None: ...

    def propose(self, rows, most) -> list[np.ndarray]:
        return [self._draft(row, limit) for row, limit in zip(rows, most.tolist(), strict=True)]

    def _draft(self, row, most: int) -> np.ndarray:
        answer = self.answers[(row.request.token_ids.tobytes(), row.request.key)]
        done = row.known - row.context_length
        # Beyond the end too, where an engine must not look: whatever stands there is noise.
        rest = np.concatenate([answer[done:], self.rng.integers(0, VOCAB, 5)])[: max(most, 0)]
        kind = self.rng.choice(["right", "wrong", "random"]) if self.kind == "mixed" else self.kind
        if kind == "wrong":
            rest = (rest + 1) % VOCAB
        elif kind == "random":
            rest = rest[: self.rng.integers(0, len(rest) + 1)].copy()
            if len(rest):
                rest[self.rng.integers(0, len(rest)) :] = self.rng.integers(0, VOCAB)
        return rest.astype(np.int32)

    def verified(self, drafted, appended, seconds, tokens) -> None:
        self.drafted += int(drafted.sum())
        self.accepted += sum(len(tokens) - 1 for tokens in appended)

    def finished(self, sequence) -> None: ...

    def released(self, sequence) -> None: ...

    def abandoned(self) -> None: ...

    def weights_changed(self, policy_version) -> None: ...


def answers_of(found: dict) -> dict:
    return {(request.token_ids.tobytes(), request.key): result.token_ids for request, result in found.values()}


def suffix_drafting(**changes) -> SuffixDrafting:
    """Cheap tokens, so that much is drafted."""
    drafter = DrafterParams(depth=8, early_depth=2, draft=DraftParams(min_probability=0.05, width=6))
    return SuffixDrafting(Speculator(drafter, BudgetParams(**changes), ForwardCost(1.0, 1e-3, 0.0, 0.0)))


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
    steps, compared = 5, 0
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
    assert compared == 1120
    statistics = engine.statistics()
    assert statistics["accepted_drafts"] > 0.01 * statistics["decoded_tokens"]
    assert statistics["drafted_tokens"] > statistics["accepted_drafts"]
    assert statistics["forwards"] < plain.statistics()["forwards"]
    assert drafting.speculator.drafter.num_samples == compared


def test_an_error_leaves_drafts_and_pages_empty() -> None:
    model = make_model(7)
    drafting = suffix_drafting()
    engine = started(model, NEVER, drafting=drafting)
    prompts = random_prompts(np.random.default_rng(1), [4] * 6)
    requests = [GenerationRequest(i, prompt, 9, i) for i, prompt in enumerate(prompts)]
    clean = generate(engine, requests)
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
    engine.start(NEVER, 4)
    again = generate(engine, requests)
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in clean]
