"""Where training gets rollouts from: stored files or a sampler, behind one call.

A collection of rollouts is a function of the settings, the current weights and its number alone. So a source keeps
nothing that a checkpoint would have to save: a resumed run asks for the next number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_dta.rollouts.record import Rollout


class RolloutSource(ABC):
    """Hands out the rollouts that training is about to learn from."""

    @abstractmethod
    def next_batch(self, step: int) -> list[Rollout]:
        """Collection number ``step``, counted from 0; whole groups, at least one rollout with a trained token."""


class Evaluation(ABC):
    """Judges the current weights on held-out data."""

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics by name, such as ``reward``, after ``step`` optimizer steps; the training noise is not touched."""
