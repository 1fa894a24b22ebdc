"""Sample more prompts than are trained and reject those whose rollouts all have one reward: they would teach nothing.

Dynamic sampling of DAPO (arXiv 2503.14476), with a fixed number of prompts sampled at once, as the TreePO paper does
(three times as many as are trained): a collection stays a function of the weights and its number. Where too few
prompts remain, rejected ones make up for them in order, so a collection always has its number of groups.
"""

from __future__ import annotations

from megatron_dta.rollouts import Rollout
from megatron_dta.rollouts.collection_order import SampledSource, WrappedSource
from megatron_dta.rollouts.paths import decoded_tokens


class DynamicSamplingSource(WrappedSource, SampledSource):
    """The first ``groups`` groups of ``inner``'s collection whose rewards differ; see the module's docstring."""

    _inner: SampledSource

    def __init__(self, inner: SampledSource, groups: int) -> None:
        super().__init__(inner)
        self._groups = groups
        self._statistics: dict[str, float] = {}

    def next_batch(self, step: int) -> list[Rollout]:
        """See ``RolloutSource``."""
        return self.sample(step, step)

    def sample(self, collection: int, batch: int) -> list[Rollout]:
        """See ``SampledSource``."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in self._inner.sample(collection, batch):
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
        """Groups with equal rewards and others that were sampled, and the tokens decoded for what is not trained."""
        return self._inner.statistics() | self._statistics
