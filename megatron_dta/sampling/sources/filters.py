"""Filters for sources of sampled rollouts: dynamic sampling, over-sampling and overlong reward shaping.

**Dynamic sampling** (DAPO, arXiv 2503.14476). A group whose rewards are all equal has advantages of 0, so training it
has no effect. Rollout batch k is therefore collected in rounds, each with its own prompts, until it has ``--rollout-
batch-size`` groups whose rewards differ, or until ``--dynamic-sampling-max-rounds`` rounds are done. Round r of batch k
takes prompt batch k x rounds + r, so a rollout batch still follows from its number alone and no state has to be saved.
The prompts of unneeded rounds are skipped in this epoch. If fewer groups differ than a batch has optimizer steps, other
groups fill it up. Schedules and windows count rollout batches, not rounds.

**Over-sampling** (``--over-sampling-batch-size``, as in the TreePO paper) is dynamic sampling with a fixed number of
prompts, all sampled at once. If too few groups differ, rejected groups fill the batch in order.

**Overlong shaping.** With L = ``--rollout-max-response-len`` and B = ``--overlong-buffer-len``, a response of n tokens
loses factor x (n - (L - B)) / B of its reward, clipped to [0, factor]. With L = 100, B = 20 and factor 1, a response of
90 tokens loses 0.5. Groups are filtered by their rewards before shaping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_dta.core.rollouts.paths import decoded_tokens
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.config.run import SampledRun
from megatron_dta.sampling.sources.batch_source import RolloutSource, SampledSource


class FilteringSource(RolloutSource):
    """``inner`` with the filters of the settings applied."""

    def __init__(self, inner: SampledSource, config: SampledRun) -> None:
        self._inner, self._settings, self._sampling = inner, config.filtering, config.sampling
        self._rounds = self._settings.dynamic_sampling_max_rounds if self._settings.dynamic_sampling else 1
        self._statistics: dict[str, float] = {}
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict
        self.timing, self.close = inner.timing, inner.close

    def next_batch(self, step: int) -> list[Rollout]:
        """Rollout batch number ``step``; see the module's docstring."""
        self._statistics = {}
        if self._settings.dynamic_sampling:
            groups = self._differing_groups(step)
        else:
            groups = groups_of(self._inner.sample(step, step))
            if len(groups) > self._sampling.rollout_batch_size:
                groups = self._over_sampled(groups)
        rollouts = [rollout for group in groups for rollout in group]
        if self._settings.overlong_buffer_len is None:
            return rollouts
        longest = self._sampling.rollout_max_response_len
        shaped = [shape_reward(rollout, longest, self._settings.overlong_buffer_len) for rollout in rollouts]
        lost = [before.reward - after.reward for before, after in zip(rollouts, shaped, strict=True)]
        self._statistics["overlong_penalty"] = float(np.mean(lost))
        return shaped

    def _differing_groups(self, step: int) -> list[list[Rollout]]:
        """Dynamic sampling: groups whose rewards differ, and as many others as optimizer steps need."""
        useful: list[list[Rollout]] = []
        others: list[list[Rollout]] = []
        wanted = self._sampling.rollout_batch_size
        for number in range(self._rounds):
            for group in groups_of(self._inner.sample(step, step * self._rounds + number)):
                (useful if differs(group) else others).append(group)
            if len(useful) >= wanted:
                break
        filling = max(0, self._sampling.num_steps_per_rollout - len(useful[:wanted]))
        self._statistics = {
            "sampling_rounds": float(number + 1),
            "uniform_groups": len(others) / (len(useful) + len(others)),
            "left_out_decoded_tokens": _decoded(useful[wanted:] + others[filling:]),
        }
        return useful[:wanted] + others[:filling]

    def _over_sampled(self, groups: list[list[Rollout]]) -> list[list[Rollout]]:
        """The first groups whose rewards differ, filled up with others."""
        order = sorted(range(len(groups)), key=lambda i: (not differs(groups[i]), i))
        kept = set(order[: self._sampling.rollout_batch_size])
        useful = sum(map(differs, groups))
        self._statistics = {
            "rejected_groups": float(len(groups) - useful),
            "useful_groups": float(useful),
            "left_out_decoded_tokens": _decoded([group for i, group in enumerate(groups) if i not in kept]),
        }
        return [group for i, group in enumerate(groups) if i in kept]

    def statistics(self) -> dict[str, float]:
        """``sampling_rounds``, ``uniform_groups`` (fraction of the groups sampled), ``rejected_groups`` and
        ``useful_groups`` (over-sampling), ``left_out_decoded_tokens``, ``overlong_penalty`` (mean).
        """
        return self._inner.statistics() | self._statistics


def _decoded(groups: Sequence[Sequence[Rollout]]) -> float:
    rollouts = [rollout for group in groups for rollout in group]
    return float(decoded_tokens(rollouts)) if rollouts else 0.0


def groups_of(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each group, in order of appearance."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    return list(groups.values())


def differs(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group are not all equal."""
    return any(rollout.reward != group[0].reward for rollout in group)


def shape_reward(rollout: Rollout, max_tokens: int, buffer: int) -> Rollout:
    """The rollout with its length penalty subtracted from its reward, at its end."""
    excess = int(np.count_nonzero(rollout.loss_mask)) - (max_tokens - buffer)
    penalty = min(max(excess / buffer, 0.0), 1.0)
    if penalty == 0:
        return rollout
    changes: dict[str, Any] = {"reward": rollout.reward - penalty}
    if rollout.segment_rewards is not None:
        rewards = rollout.segment_rewards.copy()
        rewards[-1] -= penalty
        changes["segment_rewards"] = rewards
    return replace(rollout, **changes)
