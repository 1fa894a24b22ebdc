"""The engine that replays recorded rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.interface import FinishReason, GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.replay import ReplayEngine
from megatron_dta.sampling.sources.batch_source import RolloutError
from megatron_dta.sampling.sources.rank0_source import pack_rollout, unpack_rollout

VOCABULARY = 37
EOS = 3


def recorded(rng: np.random.Generator, prompts: int, per_prompt: int) -> list[Rollout]:
    rollouts = []
    for prompt in range(prompts):
        context = rng.integers(4, VOCABULARY, 2 + prompt)
        for _ in range(per_prompt):
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
            of_prompt = [rollout for rollout in rollouts if rollout.group_id == str(prompt)]
            expected = of_prompt[visit]
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
        unpacked = unpack_rollout(pack_rollout(rollout))
        for name, value in vars(rollout).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(unpacked, name), value)
                assert getattr(unpacked, name).dtype == value.dtype
            else:
                assert getattr(unpacked, name) == value
