"""The critic's advantages, returns and metrics by their definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.objectives.advantages import estimate_advantages
from megatron_dta.core.objectives.fields import LossFields
from megatron_dta.core.objectives.gae import generalized_advantages, received_rewards, token_rewards, whiten
from megatron_dta.core.objectives.value import value_loss
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.sample_granularity import cut_length, cut_turns

CLIP = 0.1


@pytest.mark.parametrize("seed", range(2))
def test_only_values_beyond_the_clip_count_as_clipped(seed):
    """In float32 many values within the clip have, by rounding, another loss with it than without."""
    rng = seed_all(seed)
    inside = torch.arange(400) < 200
    old, present, returns = (
        torch.from_numpy(rng.uniform(-CLIP / 2, CLIP / 2, 400).astype(np.float32)) for _ in range(3)
    )
    present = torch.where(inside, present, old + present.sign() * CLIP * 2)
    fields = LossFields(loss_mask=torch.ones(400, dtype=torch.bool), old_values=old, returns=returns)
    actual = value_loss(present, None, fields, value_clip=CLIP)
    bound = old + (present - old).sign() * CLIP
    expected = ~inside & ((bound - returns).abs() > (present - returns).abs())
    assert actual.metrics["value_clip_fraction"].tolist() == expected.tolist()
    # Only a return beyond the value itself is farther from the bound than from the value.
    far = value_loss(present, None, replace(fields, returns=present), value_clip=CLIP)
    assert far.metrics["value_clip_fraction"].tolist() == (~inside).tolist()


def slow_advantages(rewards, values, mask, gamma, lam):
    """From the definition: A_t = sum over later deltas, each discounted."""
    trained = np.flatnonzero(mask)
    advantages = np.zeros(len(mask))
    for i, t in enumerate(trained):
        for k in range(i, len(trained)):
            after = values[trained[k + 1]] if k + 1 < len(trained) else 0.0
            delta = rewards[trained[k]] + gamma * after - values[trained[k]]
            advantages[t] += (gamma * lam) ** (k - i) * delta
    return advantages


@pytest.mark.parametrize(("seed", "gamma", "lam"), [(0, 1.0, 0.95), (1, 0.9, 0.7), (2, 1.0, 1.0), (3, 0.5, 0.0)])
def test_advantages_by_the_definition(seed, gamma, lam):
    rng = seed_all(seed)
    masks = [rng.random(rng.integers(1, 14)) < 0.6 for _ in range(7)]
    rewards = [np.where(mask, rng.normal(size=len(mask)), np.nan) for mask in masks]
    values = [np.where(mask, rng.normal(size=len(mask)), np.nan) for mask in masks]
    advantages, returns = generalized_advantages(rewards, values, masks, gamma, lam)
    for a, r, reward, value, mask in zip(advantages, returns, rewards, values, masks, strict=True):
        expected = slow_advantages(reward, value, mask, gamma, lam)
        np.testing.assert_allclose(a, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(r[mask], expected[mask] + value[mask], rtol=1e-12, atol=1e-12)
        assert (r[~mask] == 0).all()


def test_rewards_come_with_trained_tokens():
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
    plain = Rollout(np.arange(8), mask, reward=2.5)
    np.testing.assert_array_equal(token_rewards(plain), [0, 0, 0, 0, 0, 0, 2.5, 0])
    turns = Rollout(
        np.arange(8), mask, reward=3.5, segment_ends=[2, 4, 8], branches=[0, 0, 0], segment_rewards=[0.5, 1.0, 2.0]
    )
    # What came before the first trained token is received with it.
    np.testing.assert_array_equal(token_rewards(turns), [0, 0, 0.5, 1.0, 0, 0, 2.0, 0])
    # Where segments follow each other without a pause, a reward does not slip to the next segment's first token.
    sampled = Rollout(
        np.arange(8),
        np.arange(8) >= 2,
        reward=3.5,
        segment_ends=[3, 5, 8],
        branches=[0, 0, 0],
        segment_rewards=[0.5, 1.0, 2.0],
    )
    np.testing.assert_array_equal(token_rewards(sampled), [0, 0, 0.5, 0, 1.0, 0, 0, 2.0])


@pytest.mark.parametrize("has_segment_rewards", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_cut_samples_receive_what_is_still_to_come(seed: int, has_segment_rewards: bool):
    """A turn, and what --seq-length leaves, have the advantages that their tokens have in the whole trajectory."""
    rng = seed_all(seed)
    wholes, turns, heads = [], [], []
    for number in range(5):
        length = int(rng.integers(4, 30))
        mask = (np.arange(length) > 0) & (rng.random(length) < 0.6)
        mask[2] = True
        ends = np.append(np.flatnonzero(rng.random(length - 1) < 0.3) + 1, length)
        rewards = rng.integers(-8, 9, len(ends)) / 4
        uncut = Rollout(
            np.arange(length),
            mask,
            reward=float(rewards.sum()),
            group_id="g",
            segment_ends=ends,
            branches=np.zeros(len(ends), int),
            segment_rewards=rewards if has_segment_rewards else None,
        )
        penalty = np.where(mask, rng.integers(-8, 9, length) / 4, 0)
        wholes.append((uncut, penalty))
        parts = cut_turns(uncut, f"t{number}")
        turns.append([(part, np.where(part.loss_mask, penalty[: len(part)], 0)) for part in parts])
        head = cut_length(uncut, int(rng.integers(3, length + 1)))
        heads.append((head, penalty[: len(head)]))

    def to_come(pairs: list) -> list[tuple[np.ndarray, np.ndarray]]:
        """Advantages of REINFORCE++, and of PPO without a discount and with values of 0."""
        rollouts, penalties = zip(*pairs, strict=True)
        settings = ObjectiveConfig(advantage_estimator="reinforce_plus_plus", advantage_whitening="none")
        masks = [rollout.loss_mask for rollout in rollouts]
        critics, _ = generalized_advantages(
            received_rewards(rollouts, penalties), [0 * p for p in penalties], masks, 1, 1
        )
        return list(zip(estimate_advantages(rollouts, settings, penalties), critics, strict=True))

    expected = to_come(wholes)
    for (rollout, _), actual, wanted in zip(
        [pair for parts in turns for pair in parts],
        to_come([pair for parts in turns for pair in parts]),
        [wanted for parts, wanted in zip(turns, expected, strict=True) for _ in parts],
        strict=True,
    ):
        for value, other in zip(actual, wanted, strict=True):
            np.testing.assert_array_equal(value[rollout.loss_mask], other[: len(rollout)][rollout.loss_mask])
    # What is cut away is not trained, so it has no penalty.
    for (_, penalty), (head, _) in zip(wholes, heads, strict=True):
        penalty[len(head) :] = 0
    expected = to_come(wholes)
    for (rollout, _), actual, wanted in zip(heads, to_come(heads), expected, strict=True):
        for value, other in zip(actual, wanted, strict=True):
            np.testing.assert_array_equal(value[rollout.loss_mask], other[: len(rollout)][rollout.loss_mask])


def test_whitened_advantages_have_mean_0_and_sample_variance_1():
    rng = seed_all(3)
    masks = [rng.random(20) < 0.5 for _ in range(6)]
    advantages = [rng.normal(3, 5, size=20) for _ in masks]
    white = whiten(advantages, masks)
    values = np.concatenate([w[m] for w, m in zip(white, masks, strict=True)])
    assert values.mean() == pytest.approx(0, abs=1e-12)
    assert values.std(ddof=1) == pytest.approx(1, rel=1e-7)
    assert all((w[~m] == 0).all() for w, m in zip(white, masks, strict=True))


def test_equal_advantages_whiten_to_nothing():
    """Of equal large values the mean is off by rounding, which must not become a signal."""
    rng = seed_all(9)
    for _ in range(300):
        value, count = 10 ** rng.uniform(-3, 12), int(rng.integers(2, 60))
        advantages = [np.full(int(length), value) for length in rng.integers(1, 30, count)]
        white = whiten(advantages, [np.ones(len(values), bool) for values in advantages])
        assert all((values == 0).all() for values in white)
    # A small spread is one, though.
    white = whiten([np.array([1e6, 1e6 + 1e-3])], [np.ones(2, bool)])
    np.testing.assert_allclose(white[0], [-(0.5**0.5), 0.5**0.5], rtol=1e-2)
