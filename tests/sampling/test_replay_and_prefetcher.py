"""The engine that replays recorded rollouts, and the thread that samples ahead: its bound and its errors."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.rollouts.batch_source import RolloutError
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.interface import FinishReason, GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.replay import ReplayEngine
from megatron_dta.sampling.sources.prefetcher import RolloutPrefetcher
from megatron_dta.sampling.sources.rank0_source import pack_rollout, unpack_rollout

VOCABULARY = 37
EOS = 3


def recorded(rng: np.random.Generator, prompts: int, each: int) -> list[Rollout]:
    rollouts = []
    for prompt in range(prompts):
        context = rng.integers(4, VOCABULARY, 2 + prompt)
        for _ in range(each):
            response = rng.integers(4, VOCABULARY, rng.integers(1, 9))
            if rng.random() < 0.7:
                response[-1] = EOS
            tokens = np.concatenate([context, response]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(context)
            logprobs = np.where(mask, -rng.random(len(tokens)), 0)
            rollouts.append(Rollout(tokens, mask, logprobs=logprobs, group_id=str(prompt), policy_version=9))
    return [rollouts[i] for i in rng.permutation(len(rollouts))]


@pytest.mark.parametrize("seed", range(4))
def test_replay_gives_each_recorded_response_once_in_order(seed: int) -> None:
    rng = seed_all(seed)
    rollouts = recorded(rng, 4, 5)
    engine = ReplayEngine(rollouts)
    params = SamplingParams(max_response_tokens=8, eos_id=EOS)
    for visit in range(5):
        engine.start(params, 0)
        starts = [next(r for r in rollouts if r.group_id == str(prompt)) for prompt in range(4)]
        contexts = [rollout.token_ids[: int(np.argmax(rollout.loss_mask))] for rollout in starts]
        results = generate(engine, [GenerationRequest(i, c, 8, key=i) for i, c in enumerate(contexts)])
        for prompt, result in enumerate(results):
            own = [rollout for rollout in rollouts if rollout.group_id == str(prompt)]
            expected = own[visit]
            begin = len(contexts[prompt])
            np.testing.assert_array_equal(result.token_ids, expected.token_ids[begin:])
            np.testing.assert_array_equal(result.logprobs, expected.logprobs[begin:])
            assert (result.finish_reason is FinishReason.STOP) == (expected.token_ids[-1] == EOS)
            assert result.policy_version == 9
    with pytest.raises(RolloutError, match="all 5 recorded continuations of the 2 tokens"):
        engine.submit([GenerationRequest(0, contexts[0], 8, key=0)])
    with pytest.raises(RolloutError, match="no recorded rollout continues the 3 tokens"):
        engine.submit([GenerationRequest(0, np.array([1, 1, 1], np.int32), 8, key=0)])
    # A shorter cap cuts; a longer context continues its recorded sequence; an evaluation starts again.
    engine.start(SamplingParams(max_response_tokens=8, eos_id=EOS, domain=Domain.EVALUATION), 0)
    longest = max(rollouts, key=len)
    context = longest.token_ids[:-2]
    (result,) = generate(engine, [GenerationRequest(7, context, 1, key=0)])
    assert result.token_ids.tolist() == longest.token_ids[-2:-1].tolist()
    assert result.finish_reason is FinishReason.LENGTH


def test_packed_rollouts_come_back_whole() -> None:
    rng = seed_all(2)
    for rollout in recorded(rng, 3, 2):
        found = unpack_rollout(pack_rollout(rollout))
        for name, value in vars(rollout).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(found, name), value)
                assert getattr(found, name).dtype == value.dtype
            else:
                assert getattr(found, name) == value


def one(version: int) -> list[Rollout]:
    return [Rollout([1, 2], [False, True], policy_version=version)]


@pytest.mark.parametrize("seed", range(6))
def test_producer_keeps_its_bound_whatever_the_speeds(seed: int) -> None:
    rng = seed_all(seed)
    steps = int(rng.integers(1, 4))
    bound = int(rng.integers(0, 7))
    total = 12
    state = {"version": -1}
    collected: list[int] = []
    busy = threading.Lock()

    def collect(number: int) -> list[Rollout]:
        assert busy.acquire(blocking=False)
        version = state["version"]
        time.sleep(rng.random() * 0.01)
        assert state["version"] == version  # weights change between collections only
        collected.append(number)
        busy.release()
        return one(version)

    prefetcher = RolloutPrefetcher(collect, lambda version, folder: state.update(version=version), steps, bound, total)
    step, newest = 0, []
    for number in range(total):
        prefetcher.offer(step, None)
        found = None
        while found is None:
            found = prefetcher.take(number, step, 0.02)
        age = step - found[0].policy_version
        assert 0 <= age <= bound
        newest.append(age)
        if number == 5:
            while not prefetcher.finish_begun(0.02):
                pass
            ahead = prefetcher.ready()
            assert len(ahead) == min(bound // steps, total - 6)
        time.sleep(rng.random() * 0.01)
        step += steps
    prefetcher.close()
    assert collected == list(range(total))
    if bound < steps:
        assert newest == [0] * total


def test_an_error_of_the_producer_reaches_who_takes_next() -> None:
    def collect(number: int) -> list[Rollout]:
        if number == 2:
            raise RolloutError("no more")
        return one(0)

    prefetcher = RolloutPrefetcher(collect, lambda version, folder: None, 1, 4, 100)
    prefetcher.offer(0, None)
    assert prefetcher.run(lambda: 3).result(5) == 3
    assert prefetcher.take(0, 0, 5) is not None
    assert prefetcher.take(1, 1, 5) is not None  # sampled before the error
    with pytest.raises(RolloutError, match="no more"):
        prefetcher.take(2, 2, 5)
    with pytest.raises(RolloutError, match="no more"):
        prefetcher.take(2, 2, 5)
    late = prefetcher.run(lambda: 4)
    with pytest.raises(RolloutError, match="no more"):
        late.result(5)
    prefetcher.close()


@pytest.mark.parametrize("bound", [0, 3])
def test_a_run_that_needs_more_collections_than_planned_gets_them(bound: int) -> None:
    """Where rewards have failed, or no pairs are found, a collection has fewer steps than planned, or none."""
    collected: list[int] = []

    def collect(number: int) -> list[Rollout]:
        collected.append(number)
        return one(0)

    prefetcher = RolloutPrefetcher(collect, lambda version, folder: None, 1, bound, 2)
    prefetcher.offer(0, None)
    for number in range(4):
        assert prefetcher.take(number, 0, 5) is not None, number
        assert prefetcher.finish_begun(5)
    time.sleep(0.05)
    assert collected == [0, 1, 2, 3]  # none that nobody has asked for
    prefetcher.close()
