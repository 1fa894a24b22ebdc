"""Counts the responses of a rollout batch that the engine ended because their text was degenerate.

Such a stop changes the samples, as a length cap does, and the response looks like one cut at the cap. The count is
therefore a metric of every step, with and without speculation.
"""

from __future__ import annotations

from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.in_process.engine import InProcessEngine
from megatron_dta.sampling.sources.batch_source import RolloutSource, WrappedSource


class StoppingSource(WrappedSource):
    """``inner``, whose engine stops degenerate responses."""

    def __init__(self, inner: RolloutSource, engine: InProcessEngine) -> None:
        super().__init__(inner)
        self._engine, self._stopped = engine, 0.0

    def next_batch(self, step: int) -> list[Rollout]:
        before = self._engine.statistics()["stopped_degenerate"]
        rollouts = self._inner.next_batch(step)
        stopped = self._engine.statistics()["stopped_degenerate"] - before
        self._stopped = float(sum(current_mesh().gather_from_replicas(stopped)))
        return rollouts

    def statistics(self) -> dict[str, float]:
        """Adds ``degenerate_responses`` of the last batch over all replicas, including those that are not trained."""
        return self._inner.statistics() | {"degenerate_responses": self._stopped}
