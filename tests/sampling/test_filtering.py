"""Dynamic sampling, overlong shaping and rejection sampling on sources whose rewards are known."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.config import FilterConfig
from megatron_dta.sampling.sources.batch_source import SampledSource
from megatron_dta.sampling.sources.filters import FilteringSource, shape_reward
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.data.rejection import select_rollouts
from trainer_cases import MODEL


def settings(flags: str) -> TrainConfig:
    model = MODEL.split(" --vocab-size")[0].replace("embeddings 32", "embeddings 64")
    sampling = "--task arithmetic --rollout-max-response-len 20 --rollout-batch-size 4 --n-samples-per-prompt 2"
    return parse_arguments(f"{model} {sampling} {flags}".split())


@dataclass
class Planned(SampledSource):
    """Group g of batch k has equal rewards where ``equal(k, g)`` says so."""

    equal: object
    asked: list[tuple[int, int]] = field(default_factory=list)

    def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
        self.asked.append((rollout_batch, prompt_batch))
        rollouts = []
        for group in range(4):
            for member in range(2):
                reward = 0.0 if self.equal(prompt_batch, group) else float(member)
                mask = np.array([False, True, True])
                name = f"{prompt_batch}:{group}"
                rollouts.append(
                    Rollout([group, 1, 2], mask, reward=reward, group_id=name, policy_version=rollout_batch)
                )
        return rollouts


def names(rollouts: list[Rollout]) -> list[str]:
    return [rollout.group_id for rollout in rollouts[::2]]


def test_uniform_groups_are_replaced_by_other_prompts() -> None:
    inner = Planned(lambda step, group: (step + group) % 2 == 0)
    source = FilteringSource(inner, settings("--dynamic-sampling --dynamic-sampling-max-rounds 3"))
    rollouts = source.next_batch(2)
    assert inner.asked == [(2, 6), (2, 7)]  # two rounds were enough
    assert names(rollouts) == ["6:1", "6:3", "7:0", "7:2"]
    assert {rollout.policy_version for rollout in rollouts} == {2}
    assert source.statistics() == {"sampling_rounds": 2.0, "uniform_groups": 0.5, "left_out_decoded_tokens": 16.0}
    assert names(source.next_batch(2)) == names(rollouts)  # nothing is remembered


def test_the_rounds_end() -> None:
    inner = Planned(lambda step, group: not (step == 1 and group == 3))
    source = FilteringSource(inner, settings("--dynamic-sampling --dynamic-sampling-max-rounds 2"))
    assert names(source.next_batch(0)) == ["1:3"]
    steps = settings("--dynamic-sampling --dynamic-sampling-max-rounds 2 --num-steps-per-rollout 2")
    assert names(FilteringSource(inner, steps).next_batch(0)) == ["1:3", "0:0"]  # a step needs a group
    assert names(FilteringSource(Planned(lambda *_: True), steps).next_batch(0)) == ["0:0", "0:1"]


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0), (14, 0), (15, 0), (16, 0.2), (18, 0.6), (20, 1.0)])
def test_long_responses_lose_reward_linearly(tokens: int, penalty: float) -> None:
    mask = np.arange(tokens + 3) >= 3
    rollout = Rollout(np.arange(tokens + 3), mask, reward=1.0)
    assert shape_reward(rollout, 20, 5).reward == pytest.approx(1 - penalty)
    turns = {"segment_ends": [3, tokens + 3], "branches": [0, 0], "segment_rewards": [0.25, 0.75]}
    shaped = shape_reward(Rollout(np.arange(tokens + 3), mask, reward=1.0, **turns), 20, 5)
    np.testing.assert_allclose(shaped.segment_rewards, [0.25, 0.75 - penalty], rtol=1e-6)


def test_groups_are_judged_before_shaping() -> None:
    """Other lengths of equal answers are no reason to keep a group."""

    class Lengths(Planned):
        def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
            long = np.arange(23) >= 3
            return [
                Rollout(np.arange(length), long[:length], reward=1.0, group_id=f"{prompt_batch}:{group}")
                for group in range(4)
                for length in (10, 23)
            ]

    flags = "--dynamic-sampling --overlong-buffer-len 5"
    source = FilteringSource(Lengths(lambda *_: True), settings(flags))
    rollouts = source.next_batch(0)
    assert source.statistics()["uniform_groups"] == 1
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]
    assert source.statistics()["overlong_penalty"] == pytest.approx(0.5)


def test_rejection_sampling() -> None:
    rewards = {"a": [0.0, 1.0, 1.0], "b": [0.5, 0.2]}
    mask = np.array([False, True])
    rollouts = [
        Rollout([0, i], mask, reward=r, group_id=g) for g, values in rewards.items() for i, r in enumerate(values)
    ]

    def chosen(**flags: object) -> list[tuple[str, int]]:
        return [(r.group_id, int(r.token_ids[1])) for r in select_rollouts(rollouts, FilterConfig(**flags))]

    assert len(chosen()) == 5
    assert chosen(rejection_sampling="best") == [("a", 1), ("b", 0)]
    assert chosen(rejection_sampling="threshold", rejection_reward_threshold=0.5) == [("a", 1), ("a", 2), ("b", 0)]
    assert chosen(rejection_sampling="threshold", rejection_reward_threshold=2) == []
    assert chosen(rejection_sampling="best", rejection_reward_threshold=0.6) == [("a", 1)]
    assert chosen(rejection_sampling="best", rejection_reward_threshold=0.5) == [("a", 1), ("b", 0)]
    turns = [replace(rollout, trajectory_id=f"t{i // 2}") for i, rollout in enumerate(rollouts)]
    selected = select_rollouts(turns, FilterConfig(rejection_sampling="best"))
    assert [(r.group_id, r.trajectory_id) for r in selected] == [("a", "t0"), ("a", "t0"), ("b", "t1")]
