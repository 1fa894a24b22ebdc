"""Turns rewards into the advantage of every token: the estimators of ``--advantage-estimator``.

R_i is the reward of trajectory i, and its group are the n trajectories of one prompt. Means are plain, or weighted by
the leaf weights of sampled trees (``--leaf-weights``), which makes them unbiased estimates.

    grpo                          (R_i - mean) / (std + 1e-6)                        arXiv 2402.03300
    dr_grpo                       R_i - mean                                         arXiv 2503.20783
    rloo                          R_i - mean of the others                           arXiv 2402.14740
    reinforce_plus_plus           reward still to come, whitened                     arXiv 2501.03262
    reinforce_plus_plus_baseline  R_i - mean, whitened                               arXiv 2501.03262
    treepo, treepo_segment        by the levels of the tree, whitened                ``tree_advantages``

Standard deviations are those of a sample (divisor n - 1), as in most implementations. "Whitened": minus the mean,
divided by the standard deviation, both over all trained tokens of the rollout batch, where a token counts once for
every sequence that trains it (``--advantage-whitening``). Groups whose rewards are all equal, in particular groups of
one, carry no signal: except with ``reinforce_plus_plus``, their advantages are exactly 0 and they are excluded from the
whitening.

Advantages need whole groups, so they are computed before the batch is divided. The statistics take rewards in sorted
order, so the order of the rollouts changes no bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.objective import ADVANTAGE_ESTIMATORS, ObjectiveConfig
from megatron_dta.core.objectives.weights import trajectory_names
from megatron_dta.core.rollouts.record import Rollout

STD_FLOOR = 1e-6
_WHITENED = ADVANTAGE_ESTIMATORS[3:]


def estimate_advantages(
    rollouts: Sequence[Rollout], settings: ObjectiveConfig, penalties: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Advantages per token of each rollout, float32 [T]: its own if it has them, else the estimator's.

    ``penalties``, float [T] of each rollout, are subtracted from the reward: token by token for
    ``reinforce_plus_plus``, summed over each trajectory for the other estimators. The parts of a trajectory are in the
    order in which they were sampled.

    Rollouts with advantages of their own are excluded from all statistics. Raises ``InputError`` if a reward is
    missing.
    """
    rewarded = [i for i, rollout in enumerate(rollouts) if rollout.advantages is None]
    for i in rewarded:
        if rollouts[i].reward is None:
            raise InputError(f"rollout {i + 1}: has neither a reward nor advantages, and the objective needs one")
    result = [rollout.advantages for rollout in rollouts]
    if rewarded:
        rewarded_penalties = None if penalties is None else [penalties[i] for i in rewarded]
        values = _Estimate([rollouts[i] for i in rewarded], settings, rewarded_penalties).token_advantages()
        for i, value in zip(rewarded, values, strict=True):
            result[i] = value.astype(np.float32)
    return result


def sequence_weights(rollouts: Sequence[Rollout], leaf_weights: str) -> np.ndarray:
    """Factor of each rollout's loss, float64 [Q]: its leaf weight times the leaves of its group, or 1.

    They sum to the number of trajectories in every group, so that the loss keeps its scale.
    """
    if leaf_weights not in ("loss", "both"):
        return np.ones(len(rollouts))
    group = group_numbers([rollout.group_id for rollout in rollouts])
    counted = _counted(rollouts, np.zeros(len(rollouts)))
    size = np.bincount(group[counted], minlength=group.max(initial=-1) + 1)
    return _leaf_weights(rollouts, group, counted) * size[group]


def _counted(rollouts: Sequence[Rollout], rewards: np.ndarray) -> np.ndarray:
    """bool [Q]: one sample of each trajectory; the samples of a trajectory must agree on the reward."""
    chosen = one_sample_per_trajectory(
        rewards, [rollout.group_id for rollout in rollouts], [rollout.trajectory_id for rollout in rollouts]
    )
    counted = np.zeros(len(rollouts), bool)
    counted[chosen] = True
    return counted


def _leaf_weights(rollouts: Sequence[Rollout], group: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Leaf weights that sum to 1 over the counted samples of each group; equal weights for a group without any."""
    weights = np.array([np.nan if rollout.leaf_weight is None else rollout.leaf_weight for rollout in rollouts])
    groups = group.max(initial=-1) + 1
    total = np.bincount(group[counted], weights[counted], groups)  # NaN if a weight is missing
    size = np.bincount(group[counted], minlength=groups)
    if (total <= 0).any():
        name = rollouts[int(np.argmax((total <= 0)[group]))].group_id
        raise InputError(f"group '{name}': its leaf weights are all 0, so nothing can be weighted by them")
    alike = np.isnan(total)[group]
    return np.where(alike, 1 / np.maximum(size[group], 1), weights / np.where(alike, 1, total[group]))


class _Estimate:
    """The rewards of rollouts without advantages, and the statistics that the estimators need."""

    def __init__(
        self, rollouts: Sequence[Rollout], settings: ObjectiveConfig, penalties: Sequence[np.ndarray] | None = None
    ) -> None:
        self.rollouts, self.settings, self.penalties = rollouts, settings, penalties
        self.rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
        self.names = [rollout.group_id for rollout in rollouts]
        if penalties is not None and settings.advantage_estimator != "reinforce_plus_plus":
            self.rewards -= _of_trajectories(rollouts, penalties)
        self.group = group_numbers(self.names)
        self.counted = _counted(rollouts, self.rewards)
        self.weighted = settings.leaf_weights in ("advantages", "both")
        if self.weighted:
            self.weights = _leaf_weights(rollouts, self.group, self.counted)
        else:
            self.weights = 1 / np.bincount(self.group[self.counted])[self.group]
        # Exactly 0 for groups without spread, with every estimator.
        trajectories = [rollout.trajectory_id for rollout in rollouts]
        self.plain = group_advantages(self.rewards, self.names, trajectories, normalize_std=False)
        lowest, highest = np.full(self.group.max() + 1, np.inf), np.full(self.group.max() + 1, -np.inf)
        np.minimum.at(lowest, self.group, self.rewards)
        np.maximum.at(highest, self.group, self.rewards)
        self.spread = (highest > lowest)[self.group]

    def token_advantages(self) -> list[np.ndarray]:
        """float64 [T] of each rollout."""
        name = self.settings.advantage_estimator
        if name not in ADVANTAGE_ESTIMATORS:
            raise InputError(f"--advantage-estimator {name}: choose from {', '.join(ADVANTAGE_ESTIMATORS)}")
        grpo = self._centred if self.settings.disable_grpo_std_normalization else self._normalized
        of_rollouts = {"grpo": grpo, "rloo": self._rloo}
        of_rollouts |= dict.fromkeys(("dr_grpo", "reinforce_plus_plus_baseline"), self._centred)
        if name in of_rollouts:
            ends = np.cumsum([len(rollout) for rollout in self.rollouts])
            tokens = np.repeat(of_rollouts[name](), np.diff(ends, prepend=0))
            advantages = [tokens[begin:end] for begin, end in pairwise([0, *ends.tolist()])]
        elif name == "reinforce_plus_plus":
            advantages = [_reward_to_come(rollout) for rollout in self.rollouts]
            if self.penalties is not None:
                from megatron_dta.core.objectives.gae import later_penalties

                later = later_penalties(self.rollouts, self.penalties)
                to_come = [np.cumsum(p[::-1])[::-1] + rest for p, rest in zip(self.penalties, later, strict=True)]
                advantages = [advantage - penalty for advantage, penalty in zip(advantages, to_come, strict=True)]
        else:
            from megatron_dta.core.objectives.tree_advantages import LevelOptions, tree_advantages

            names = self.settings.treepo_advantages or []
            options = LevelOptions("size-weighted" in names, "drop-root" in names, "reject-zero-variance" in names)
            per_segment = name == "treepo_segment"
            advantages = tree_advantages(self.rollouts, self.rewards, self.weights, self.counted, per_segment, options)
        whitening = self.settings.advantage_whitening or ("token" if name in _WHITENED else "none")
        return self._whiten(advantages, name == "reinforce_plus_plus") if whitening == "token" else advantages

    def _centred(self) -> np.ndarray:
        """R minus the group's mean, [Q]; 0 in groups without spread."""
        if not self.weighted:
            return self.plain
        use = self.counted
        mean = np.bincount(self.group[use], (self.weights * self.rewards)[use])
        return np.where(self.spread, self.rewards - mean[self.group], 0.0)

    def _normalized(self) -> np.ndarray:
        """``_centred`` over the group's standard deviation."""
        if not self.weighted:
            trajectories = [rollout.trajectory_id for rollout in self.rollouts]
            return group_advantages(self.rewards, self.names, trajectories, normalize_std=True)
        centred, use = self._centred(), self.counted
        # The unbiased variance of weighted samples; with equal weights, the divisor is n - 1.
        squares = np.bincount(self.group[use], (self.weights * centred**2)[use])
        freedom = 1 - np.bincount(self.group[use], (self.weights**2)[use])
        std = np.sqrt(squares / np.maximum(freedom, 1e-300))[self.group]
        known = (squares > 0)[self.group] & (freedom > 1e-12)[self.group]
        return np.where(known, centred / (np.where(known, std, 0.0) + STD_FLOOR), 0.0)

    def _rloo(self) -> np.ndarray:
        """R_i - sum over k != i of w_k R_k / (1 - w_i) = (R_i - mean) / (1 - w_i), as the weights sum to 1."""
        others = 1 - self.weights
        known = others > 1e-12
        return np.where(known, self._centred() / np.where(known, others, 1.0), 0.0)

    def _whiten(self, advantages: list[np.ndarray], all_groups: bool) -> list[np.ndarray]:
        """Zero mean and unit variance over the trained tokens of all sequences (of groups with spread)."""
        from megatron_dta.core.objectives.gae import mean_and_scale

        included = [i for i in range(len(advantages)) if all_groups or self.spread[i]]
        if not included:
            return advantages
        masks = [rollout.loss_mask for rollout in self.rollouts]
        values = np.concatenate([advantages[i][masks[i]] for i in included])
        # Weighted like the means: the weight of a leaf times the number of leaves of its group.
        size = np.bincount(self.group[self.counted])[self.group]
        weight = np.repeat(
            [self.weights[i] * size[i] for i in included], [np.count_nonzero(masks[i]) for i in included]
        )
        mean, scale = mean_and_scale(values, weight)
        result = list(advantages)
        for i in included:
            result[i] = (advantages[i] - mean) / scale
        return result


def _reward_to_come(rollout: Rollout) -> np.ndarray:
    """The rewards received at or after each token, float64 [T]; the whole reward if the turns are unknown."""
    if rollout.segment_rewards is None or rollout.segment_ends is None:
        return np.full(len(rollout), rollout.reward, np.float64)
    rewards = rollout.segment_rewards.astype(np.float64)
    to_come = np.cumsum(rewards[::-1])[::-1]
    return np.repeat(to_come, np.diff(rollout.segment_ends, prepend=0))


def _of_trajectories(rollouts: Sequence[Rollout], penalties: Sequence[np.ndarray]) -> np.ndarray:
    """Sum of the penalties of each rollout's trajectory, whose parts share its reward, float64 [Q]."""
    names = trajectory_names(rollouts)
    sums: dict[Hashable, float] = {}
    for name, penalty in zip(names, penalties, strict=True):
        sums[name] = sums.get(name, 0.0) + float(penalty.sum())
    return np.array([sums[name] for name in names])


def group_advantages(
    rewards: Sequence[float | None] | np.ndarray,
    group_ids: Sequence[str],
    trajectory_ids: Sequence[str | None] | None = None,
    normalize_std: bool = True,
) -> np.ndarray:
    """Advantage of each of Q samples by the statistics of its group (GRPO), float64 [Q].

    Samples with the same group and ``trajectory_id`` (None: not shared) are parts of one trajectory. Its reward counts
    once in the group's statistics, and all its samples get its advantage. Raises ``InputError`` if a reward is unknown
    (None, NaN) or infinite, or if parts of one trajectory have different rewards.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    if not len(values) == len(group_ids) == len(values if trajectory_ids is None else trajectory_ids):
        raise ValueError("rewards, group_ids and trajectory_ids must be of one length")
    if len(values) == 0:
        return values
    unknown = ~np.isfinite(values)
    if unknown.any():
        at = int(unknown.argmax())
        what = "unknown" if np.isnan(values[at]) else str(values[at])
        raise InputError(f"sample {at + 1} (group '{group_ids[at]}'): the reward is {what}, and advantages need it")
    group = group_numbers(group_ids)
    counted = one_sample_per_trajectory(values, group_ids, trajectory_ids)
    order = counted[np.lexsort((values[counted], group[counted]))]
    return _normalize(values, group, values[order], group[order], normalize_std)


def group_numbers(group_ids: Sequence[str]) -> np.ndarray:
    """int64 [Q]: number of each sample's group, in order of appearance."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in group_ids], np.int64)


def one_sample_per_trajectory(
    rewards: np.ndarray, group_ids: Sequence[str], trajectory_ids: Sequence[str | None] | None
) -> np.ndarray:
    """Indices of the samples whose reward counts: the first of each trajectory; the others must agree with it."""
    if trajectory_ids is None:
        return np.arange(len(rewards))
    first: dict[tuple[str, str], int] = {}
    counted = []
    for i, (group, trajectory) in enumerate(zip(group_ids, trajectory_ids, strict=True)):
        leader = i if trajectory is None else first.setdefault((group, trajectory), i)
        if leader == i:
            counted.append(i)
        elif rewards[i] != rewards[leader]:
            raise InputError(
                f"samples {leader + 1} and {i + 1} of trajectory '{trajectory}' (group '{group}') have rewards "
                f"{rewards[leader]} and {rewards[i]}; give per-token advantages where a trajectory has several"
            )
    return np.array(counted, np.int64)


def _normalize(
    rewards: np.ndarray, group: np.ndarray, counted: np.ndarray, counted_group: np.ndarray, normalize_std: bool
) -> np.ndarray:
    """Advantages of ``rewards`` [Q] by the statistics of ``counted`` [C], which is sorted by group, then by reward."""
    size = np.bincount(counted_group)
    mean = np.bincount(counted_group, counted) / size
    last = np.cumsum(size) - 1
    # The mean of equal rewards can be off by one ulp, so such groups are detected by their extremes.
    spread = counted[last] != counted[last - size + 1]
    advantages = np.where(spread[group], rewards - mean[group], 0.0)
    if normalize_std:
        squares = np.bincount(counted_group, (counted - mean[counted_group]) ** 2)
        std = np.sqrt(squares / np.maximum(size - 1, 1))
        advantages = advantages / (std[group] + STD_FLOOR)
    return advantages
