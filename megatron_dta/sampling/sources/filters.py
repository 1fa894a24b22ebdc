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
from megatron_dta.sampling.sources.batch_source import SampledSource, WrappedSource


class FilteringSource(WrappedSource):
    """``inner`` with the filters of the settings applied."""

    _inner: SampledSource

    def __init__(self, inner: SampledSource, config: SampledRun) -> None:
        super().__init__(inner)
        self._settings = config.filtering
        self._rounds = self._settings.dynamic_sampling_max_rounds if self._settings.dynamic_sampling else 1
        self._num_groups = config.sampling.rollout_batch_size
        self._num_steps = config.sampling.num_steps_per_rollout
        self._max_tokens = config.sampling.rollout_max_response_len
        self._statistics: dict[str, float] = {}

    def next_batch(self, step: int) -> list[Rollout]:
        """Rollout batch number ``step``; see the module's docstring."""
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
        shaped = [shape_reward(rollout, self._max_tokens, self._settings.overlong_buffer_len) for rollout in rollouts]
        lost = [before.reward - after.reward for before, after in zip(rollouts, shaped, strict=True)]
        self._statistics["overlong_penalty"] = float(np.mean(lost))
        return shaped

    def statistics(self) -> dict[str, float]:
        """``sampling_rounds``, ``uniform_groups`` (fraction of the groups sampled), ``left_out_decoded_tokens``,
        ``overlong_penalty`` (mean).
        """
        return self._inner.statistics() | self._statistics


class OverSamplingSource(SampledSource, WrappedSource):
    """The first ``groups`` groups of each batch of ``inner`` whose rewards differ; see the module's docstring."""

    _inner: SampledSource

    def __init__(self, inner: SampledSource, groups: int) -> None:
        super().__init__(inner)
        self._groups = groups
        self._statistics: dict[str, float] = {}

    def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
        groups = groups_of(self._inner.sample(rollout_batch, prompt_batch))
        useful = [i for i, group in enumerate(groups) if differs(group)]
        rejected = [i for i, group in enumerate(groups) if not differs(group)]
        kept = set((useful + rejected)[: self._groups])
        left_out = [rollout for i, group in enumerate(groups) if i not in kept for rollout in group]
        self._statistics = {
            "rejected_groups": float(len(rejected)),
            "useful_groups": float(len(useful)),
            "left_out_decoded_tokens": float(decoded_tokens(left_out)),
        }
        return [rollout for i, group in enumerate(groups) if i in kept for rollout in group]

    def statistics(self) -> dict[str, float]:
        """Adds the number of groups with equal and with differing rewards, and the decoded tokens of omitted groups."""
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
