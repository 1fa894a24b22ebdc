"""Dynamic sampling and overlong reward shaping (DAPO, arXiv 2503.14476) around any source of sampled rollouts.

**Dynamic sampling.** A group whose rewards are all equal has advantages of 0: it costs a step and teaches nothing. So
collection k is put together from rounds, each with a batch of prompts of its own, until as many groups as one round has
differ in their rewards, or ``--dynamic-sampling-max-rounds`` are over. Round r of collection k takes batch number
k x rounds + r of the prompts: what a collection is still follows from its number alone, and nothing has to be saved.
Prompts of rounds that were not needed are skipped in this epoch of the prompts. If fewer groups differ than there are
optimizer steps in a collection, others fill it up. Schedules and windows that count collections count no rounds.

**Overlong shaping.** With L = ``--rollout-max-response-len`` and B = ``--overlong-buffer-len``, a response of n tokens
loses factor x (n - (L - B)) / B of its reward, at least 0 and at most the factor. Groups are judged by the rewards
before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_dta.config import TrainConfig
from megatron_dta.rollouts import Rollout
from megatron_dta.rollouts.collection_order import SampledSource, WrappedSource
from megatron_dta.rollouts.paths import decoded_tokens


class FilteringSource(WrappedSource):
    """``inner`` with the filters that the settings ask for."""

    _inner: SampledSource

    def __init__(self, inner: SampledSource, config: TrainConfig) -> None:
        super().__init__(inner)
        self._settings = config.filtering
        self._rounds = self._settings.dynamic_sampling_max_rounds if self._settings.dynamic_sampling else 1
        self._num_groups = config.sampling.rollout_batch_size
        self._num_steps = config.sampling.num_steps_per_rollout
        self._max_tokens = config.sampling.rollout_max_response_len
        self._statistics: dict[str, float] = {}

    def next_batch(self, step: int) -> list[Rollout]:
        """Collection ``step``; see on top."""
        useful: list[list[Rollout]] = []
        others: list[list[Rollout]] = []
        for number in range(self._rounds):
            for group in groups_of(self._inner.sample(step, step * self._rounds + number)):
                keep = not self._settings.dynamic_sampling or differs(group)
                (useful if keep else others).append(group)
            if len(useful) >= self._num_groups:
                break
        self._statistics = {}
        if self._settings.dynamic_sampling:
            self._statistics = {
                "sampling_rounds": float(number + 1),
                "uniform_groups": len(others) / (len(useful) + len(others)),
            }
        chosen = useful[: self._num_groups]
        filling = max(0, self._num_steps - len(chosen))
        if self._settings.dynamic_sampling:
            left_out = [rollout for group in useful[self._num_groups :] + others[filling:] for rollout in group]
            self._statistics["left_out_decoded_tokens"] = float(decoded_tokens(left_out)) if left_out else 0.0
        chosen += others[:filling]
        rollouts = [rollout for group in chosen for rollout in group]
        if self._settings.overlong_buffer_len is None:
            return rollouts
        shaped = [
            shape_reward(
                r, self._max_tokens, self._settings.overlong_buffer_len, self._settings.overlong_penalty_factor
            )
            for r in rollouts
        ]
        lost = [before.reward - after.reward for before, after in zip(rollouts, shaped, strict=True)]
        self._statistics["overlong_penalty"] = float(np.mean(lost))
        return shaped

    def statistics(self) -> dict[str, float]:
        """``sampling_rounds``, ``uniform_groups`` (fraction of the groups sampled), ``left_out_decoded_tokens``,
        ``overlong_penalty`` (mean).
        """
        return self._inner.statistics() | self._statistics


def groups_of(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each group, in order of appearance."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    return list(groups.values())


def differs(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group are not all equal."""
    return any(rollout.reward != group[0].reward for rollout in group)


def shape_reward(rollout: Rollout, max_tokens: int, buffer: int, factor: float) -> Rollout:
    """The rollout with what its length costs taken off its reward, at its end."""
    excess = int(np.count_nonzero(rollout.loss_mask)) - (max_tokens - buffer)
    penalty = factor * min(max(excess / buffer, 0.0), 1.0)
    if penalty == 0:
        return rollout
    changes: dict[str, Any] = {"reward": rollout.reward - penalty}
    if rollout.segment_rewards is not None:
        rewards = rollout.segment_rewards.copy()
        rewards[-1] -= penalty
        changes["segment_rewards"] = rewards
    return replace(rollout, **changes)
