"""Samples more prompts than are trained and rejects groups whose rewards are all equal, since their advantages are 0.

This is the dynamic sampling of DAPO (arXiv 2503.14476) with a fixed number of prompts sampled at once, as in the TreePO
paper (three times the number trained), so a rollout batch stays a function of the weights and its number. If too few
groups remain, rejected groups fill the batch in order; a batch always has the same number of groups.
"""

from __future__ import annotations

from megatron_dta.rollouts import Rollout
from megatron_dta.rollouts.batch_source import SampledSource, WrappedSource
from megatron_dta.rollouts.paths import decoded_tokens


class DynamicSamplingSource(WrappedSource, SampledSource):
    """The first ``groups`` groups of each batch of ``inner`` whose rewards differ; see the module's docstring."""

    _inner: SampledSource

    def __init__(self, inner: SampledSource, groups: int) -> None:
        super().__init__(inner)
        self._groups = groups
        self._statistics: dict[str, float] = {}

    def next_batch(self, step: int) -> list[Rollout]:
        """See ``RolloutSource``."""
        return self.sample(step, step)

    def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
        """See ``SampledSource``."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in self._inner.sample(rollout_batch, prompt_batch):
            groups.setdefault(rollout.group_id, []).append(rollout)
        rejected = [name for name, group in groups.items() if len({rollout.reward for rollout in group}) == 1]
        useful = [name for name in groups if name not in set(rejected)]
        kept = set((useful + rejected)[: self._groups])
        left_out = [rollout for name, group in groups.items() if name not in kept for rollout in group]
        self._statistics = {
            "rejected_groups": float(len(rejected)),
            "useful_groups": float(len(useful)),
            "left_out_decoded_tokens": float(decoded_tokens(left_out)),
        }
        return [rollout for name, group in groups.items() if name in kept for rollout in group]

    def statistics(self) -> dict[str, float]:
        """Adds the number of groups with equal and with differing rewards, and the decoded tokens of omitted groups."""
        return self._inner.statistics() | self._statistics
