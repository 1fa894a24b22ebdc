"""Rejection sampling: which rollouts of a collection supervised training learns from.

best        the rollout of highest reward of each group, the first of equals
threshold   all rollouts with at least ``--rejection-reward-threshold``
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dta.config import FilterConfig
from megatron_dta.errors import InputError
from megatron_dta.rollouts import Rollout


def select_rollouts(rollouts: Sequence[Rollout], settings: FilterConfig) -> list[Rollout]:
    """What is trained of ``rollouts``, in their order; maybe nothing."""
    if settings.rejection_sampling is None:
        return list(rollouts)
    for i, rollout in enumerate(rollouts):
        if rollout.reward is None:
            raise InputError(f"rollout {i + 1}: has no reward, which --rejection-sampling selects by")
    if settings.rejection_sampling == "threshold":
        return [rollout for rollout in rollouts if rollout.reward >= settings.rejection_reward_threshold]
    best: dict[str, int] = {}
    for i, rollout in enumerate(rollouts):
        leader = best.setdefault(rollout.group_id, i)
        if rollout.reward > rollouts[leader].reward:
            best[rollout.group_id] = i
    return [rollouts[i] for i in sorted(best.values())]
