"""Rejection sampling: selects the rollouts of a batch for supervised training.

best        the rollout with the highest reward in each group (the first one on a tie), with all samples of its
            trajectory. With a threshold, groups whose highest reward is below it are dropped.
threshold   all rollouts whose reward is at least ``--rejection-reward-threshold``
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.config import FilterConfig


def select_rollouts(rollouts: Sequence[Rollout], settings: FilterConfig) -> list[Rollout]:
    """Return the selected rollouts in their original order; the list may be empty.

    Raises:
        InputError: a rollout has no reward.
    """
    if settings.rejection_sampling is None:
        return list(rollouts)
    for i, rollout in enumerate(rollouts):
        if rollout.reward is None:
            raise InputError(f"rollout {i + 1}: has no reward, which --rejection-sampling selects by")
    least = settings.rejection_reward_threshold
    if least is not None:
        rollouts = [rollout for rollout in rollouts if rollout.reward >= least]
    if settings.rejection_sampling == "threshold":
        return list(rollouts)
    best: dict[str, int] = {}
    for i, rollout in enumerate(rollouts):
        leader = best.setdefault(rollout.group_id, i)
        if rollout.reward > rollouts[leader].reward:
            best[rollout.group_id] = i
    return [rollout for i, rollout in enumerate(rollouts) if _is_part_of(rollout, i, best, rollouts)]


def _is_part_of(rollout: Rollout, number: int, best: dict[str, int], rollouts: Sequence[Rollout]) -> bool:
    """Whether a rollout is the best of its group or belongs to the same trajectory as the best one."""
    leader = best[rollout.group_id]
    name = rollouts[leader].trajectory_id
    return number == leader or (name is not None and rollout.trajectory_id == name)
