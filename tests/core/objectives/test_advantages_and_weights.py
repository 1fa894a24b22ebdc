"""Group advantages against plain loops, and the invariances of the loss of a step."""

import statistics

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.objectives.advantages import estimate_advantages, group_advantages
from megatron_dta.core.objectives.weights import TrainedCounts, count_trained, loss_weights, trajectory_shares
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.sample_granularity import cut_turns


def token_advantages(rollouts: list[Rollout], normalize_std: bool = True) -> list[np.ndarray]:
    return estimate_advantages(rollouts, ObjectiveConfig(disable_grpo_std_normalization=not normalize_std))


def advantages_by_loop(rewards: list, groups: list, trajectories: list, normalize_std: bool) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        seen: dict = {}
        for i, (r, g, t) in enumerate(zip(rewards, groups, trajectories, strict=True)):
            if g == group:
                seen[i if t is None else t] = r
        values = list(seen.values())
        advantage = reward - statistics.fmean(values)
        if len(set(values)) == 1:
            advantage = 0.0
        elif normalize_std:
            advantage /= statistics.stdev(values) + 1e-6
        result.append(advantage)
    return result


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_group_advantages_match_loop(seed: int, normalize_std: bool) -> None:
    rng = seed_all(seed)
    trajectories = int(rng.integers(1, 40))
    reward_of = rng.choice([0.0, 0.1, 1.0, -3.7], trajectories) if seed % 2 else rng.standard_normal(trajectories)
    group_of = rng.choice(list("abcdefg"), trajectories)
    source = rng.integers(0, trajectories, 70)
    rewards, groups = reward_of[source].tolist(), group_of[source].tolist()
    names = [None if i % 5 == 0 else f"t{s}" for i, s in enumerate(source)]
    actual = group_advantages(rewards, groups, names, normalize_std)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(
        actual, advantages_by_loop(rewards, groups, names, normalize_std), rtol=1e-11, atol=1e-13
    )
    # The order of the samples changes no bit.
    order = rng.permutation(70)
    shuffled = group_advantages(
        [rewards[i] for i in order], [groups[i] for i in order], [names[i] for i in order], normalize_std
    )
    np.testing.assert_array_equal(shuffled, actual[order])


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0 / 3.0, -7.3e20])
def test_groups_without_spread_give_zero(reward: float, normalize_std: bool) -> None:
    for size in (1, 2, 3, 10, 49):
        advantages = group_advantages([reward] * size + [5.0, 6.0], ["a"] * size + ["b"] * 2, None, normalize_std)
        assert (advantages[:size] == 0).all()
        assert (advantages[size:] != 0).all()
    assert group_advantages([], [], []).shape == (0,)


def test_turns_of_a_trajectory_count_once() -> None:
    """However many turns a trajectory is cut into, advantages are those of the uncut trajectories."""
    rng = seed_all(3)
    rollouts, turns, owner = [], [], []
    for i in range(12):
        loss_mask = rng.random(40) < 0.5
        loss_mask[0], loss_mask[-1] = False, True
        rollout = Rollout(rng.integers(0, 9, 40), loss_mask, float(rng.standard_normal()), group_id=str(i % 3))
        rollouts.append(rollout)
        samples = cut_turns(rollout, f"row {i}")
        turns += samples
        owner += [i] * len(samples)
    assert len(set(map(owner.count, owner))) > 1, "the trajectories should differ in their number of turns"
    expected = token_advantages(rollouts)
    for turn, i, advantages in zip(turns, owner, token_advantages(turns), strict=True):
        assert advantages.dtype == np.float32
        np.testing.assert_array_equal(advantages, expected[i][: len(turn)])


def test_own_advantages_come_first() -> None:
    in_file = np.array([0.0, 3.0, -1.0], np.float32)
    common = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "group_id": "g"}
    rollouts = [Rollout(**common, reward=100.0, advantages=in_file), *(Rollout(**common, reward=r) for r in (0.0, 1.0))]
    first, second, third = token_advantages(rollouts, normalize_std=False)
    np.testing.assert_array_equal(first, in_file)
    assert second.tolist() == [-0.5] * 3
    assert third.tolist() == [0.5] * 3
    with pytest.raises(InputError, match="rollout 2: has neither a reward nor advantages"):
        token_advantages([rollouts[0], Rollout(**common)])


@pytest.mark.parametrize(
    ("rewards", "trajectories", "reason"),
    [
        ([1.0, None], None, r"sample 2 \(group 'b'\): the reward is unknown"),
        ([1.0, float("inf")], None, r"sample 2 \(group 'b'\): the reward is inf"),
        ([1.0, 2.0], ["t", "t"], r"samples 1 and 2 of trajectory 't' .* 1.0 and 2.0"),
    ],
)
def test_unknown_rewards_are_refused(rewards: list, trajectories: list | None, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        group_advantages(rewards, ["a", "b" if trajectories is None else "a"], trajectories)


# ---------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("seed", range(2))
def test_step_loss_is_the_mean_it_is_named_after(mode: str, seed: int) -> None:
    rng = seed_all(seed)
    trained = rng.integers(0, 9, 20)
    trained[0] = 0
    losses = [rng.standard_normal(n).tolist() for n in trained]
    total = sum(w * sum(sequence) for w, sequence in zip(loss_weights(trained, mode), losses, strict=True))
    if mode == "token-mean":
        expected = statistics.fmean([loss for sequence in losses for loss in sequence])
    else:
        expected = statistics.fmean([statistics.fmean(sequence) for sequence in losses if sequence])
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean"])
def test_untrained_sequences_change_nothing(mode: str) -> None:
    alone, among = loss_weights([3, 5], mode), loss_weights([0, 3, 0, 0, 5, 0], mode)
    np.testing.assert_array_equal(among, [0, alone[0], 0, 0, alone[1], 0])
    np.testing.assert_array_equal(loss_weights([0, 0], mode), [0, 0])
    assert count_trained(np.array([0, 3, 0, 5])) == TrainedCounts(tokens=8, sequences=2)
    # With weights, too, a sequence without trained tokens is not counted.
    counts = count_trained(np.array([0, 3, 0, 5]), np.array([7.0, 0.5, 9.0, 2.0]))
    assert counts == TrainedCounts(8, 2, weighted_tokens=11.5, weighted_sequences=2.5)


@pytest.mark.parametrize("seed", range(3))
def test_a_trajectory_counts_once_however_it_is_cut(seed: int) -> None:
    """trajectory-mean is the mean of the trajectories' own means, over any number of samples each and any ranks."""
    rng = seed_all(seed)
    names = [str(name) for name in rng.integers(0, 7, 25)]
    trained = rng.integers(0, 6, 25)
    trained[[i for i, name in enumerate(names) if name == "3"]] = 0
    losses = [rng.standard_normal(n).tolist() for n in trained]
    of_trajectory: dict[str, list[float]] = {}
    for name, token_losses in zip(names, losses, strict=True):
        of_trajectory.setdefault(name, []).extend(token_losses)
    expected = statistics.fmean([statistics.fmean(values) for values in of_trajectory.values() if values])
    shares = trajectory_shares(trained, names)
    total = 0.0
    counts = count_trained(trained[:9], shares[:9]) + count_trained(trained[9:], shares[9:])
    for part in (slice(0, 9), slice(9, 25)):
        weights = loss_weights(trained[part], "trajectory-mean", counts, shares[part])
        total += sum(w * sum(token_losses) for w, token_losses in zip(weights, losses[part], strict=True))
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-14)
    alone = loss_weights(trained, "trajectory-mean", None, trajectory_shares(trained, range(25)))
    np.testing.assert_allclose(alone, loss_weights(trained, "sequence-mean"), rtol=1e-14)
