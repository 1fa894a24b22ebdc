"""The fake engine of other tests: its tokens distinguish a wrong context from the right one."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.sampling.interface import FinishReason, GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from recording_engine import RecordingEngine

VOCAB, EOS, OTHER_EOS = 50, 7, 49


def started(**settings) -> RecordingEngine:
    engine = RecordingEngine(VOCAB, **{"end_probability": 0.05, **settings})
    engine.start(SamplingParams(1, EOS, other_eos_ids=(OTHER_EOS,)), 3)
    return engine


def requests_of(rng: np.random.Generator, count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(i, rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32), int(rng.integers(1, 40)), i)
        for i in range(count)
    ]


@pytest.mark.parametrize("settings", [{}, {"tokens_per_poll": 3}, {"most_at_once": 1, "seed": 9}])
def test_every_token_follows_from_the_whole_prefix(settings: dict):
    rng = seed_all(1)
    engine = started(**settings)
    requests = requests_of(rng, 60)
    results = generate(engine, requests)
    reasons = {FinishReason.STOP: 0, FinishReason.LENGTH: 0}
    for request, result in zip(requests, results, strict=True):
        tokens = [*request.token_ids, *result.token_ids]
        for i, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            prefix = tokens[: len(request.token_ids) + i]
            assert engine.token_after(prefix, request.key) == token
            assert engine.logprob_after(prefix, request.key) == pytest.approx(logprob)
        assert set(result.token_ids[:-1].tolist()).isdisjoint({EOS, OTHER_EOS})
        assert (result.token_ids[-1] in (EOS, OTHER_EOS)) == result.ended
        assert result.ended or len(result.token_ids) == request.max_tokens
        reasons[result.finish_reason] += 1
    assert min(reasons.values()) > 5
    assert [request_id for name, request_id in engine.calls if name == "finish"] != list(range(60))
    assert engine.statistics()["decoded_tokens"] == sum(len(result.token_ids) for result in results)


def test_a_wrong_prefix_gives_other_tokens():
    """One token changed, dropped or put elsewhere, or another key: nearly every next token is another one."""
    rng = seed_all(2)
    engine = started(end_probability=0.0)
    same = 0
    for _ in range(300):
        prefix = rng.integers(0, VOCAB, 12)
        token, i = engine.token_after(prefix, 5), int(rng.integers(0, 12))
        changed = prefix.copy()
        changed[i] = (changed[i] + 1) % VOCAB
        for other, key in ((changed, 5), (np.delete(prefix, i), 5), (prefix, 6)):
            same += engine.token_after(other, key) == token
    assert same < 900 * 3 / VOCAB
