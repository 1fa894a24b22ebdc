"""Rejection sampling: which rollouts of a collection supervised training learns from.

best        the rollout of highest reward of each group, the first of equals; all samples cut from its trajectory. With
            a threshold only where that reward reaches it: of answers that are all wrong there is none to learn from
threshold   all rollouts with at least ``--rejection-reward-threshold``
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dta.common.errors import InputError
from megatron_dta.config import FilterConfig
from megatron_dta.rollouts import Rollout


def select_rollouts(rollouts: Sequence[Rollout], settings: FilterConfig) -> list[Rollout]:
    """What is trained of ``rollouts``, in their order; maybe nothing."""
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
    """Whether a rollout is the best of its group, or cut from the same trajectory."""
    leader = best[rollout.group_id]
    name = rollouts[leader].trajectory_id
    return number == leader or (name is not None and rollout.trajectory_id == name)
