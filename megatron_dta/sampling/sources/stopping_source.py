"""Counts the responses of a collection that an engine has ended for degenerate text.

Such a stop changes what is sampled, as a length cap does, and a response cut by it looks like one cut at the cap. So
how often it happens is a metric of every step, with speculation and without.
"""

from __future__ import annotations

from megatron_dta.model import current_mesh
from megatron_dta.rollouts.collection_order import RolloutSource, WrappedSource
from megatron_dta.rollouts.record import Rollout
from megatron_dta.sampling.engines.in_process.engine import InProcessEngine


class StoppingSource(WrappedSource):
    """``inner``, whose engine stops degenerate responses."""

    def __init__(self, inner: RolloutSource, engine: InProcessEngine) -> None:
        super().__init__(inner)
        self._engine, self._stopped = engine, 0.0

    def next_batch(self, step: int) -> list[Rollout]:
        before = self._engine.statistics()["stopped_degenerate"]
        rollouts = self._inner.next_batch(step)
        own = self._engine.statistics()["stopped_degenerate"] - before
        self._stopped = float(sum(current_mesh().gather_from_replicas(own)))
        return rollouts

    def statistics(self) -> dict[str, float]:
        """``degenerate_responses`` besides: of the last collection and all replicas, those that are not trained too."""
        return self._inner.statistics() | {"degenerate_responses": self._stopped}
