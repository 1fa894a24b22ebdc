"""Computes advantages from rewards: each trajectory against the others of its group (GRPO, arXiv 2402.03300).

    A_i = (R_i - mean of the group) / (standard deviation of the group + 1e-6)

The standard deviation is the sample one (divisor n - 1), as in most implementations. Without the division (Dr. GRPO,
arXiv 2503.20783), prompts of small spread are not amplified. A group whose rewards are all equal, in particular a group
of one, carries no signal: its advantages are exactly 0.

Advantages are computed before the batch is divided in any way, because they need the whole group. They are computed
from the rewards in sorted order, so that the order of the rollouts changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.common.errors import InputError

STD_FLOOR = 1e-6


def group_advantages(
    rewards: Sequence[float | None] | np.ndarray,
    group_ids: Sequence[str],
    trajectory_ids: Sequence[str | None] | None = None,
    normalize_std: bool = True,
) -> np.ndarray:
    """Advantage of each of Q samples, float64 [Q].

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
