"""Where training gets rollouts from: stored files or a sampler, behind one call.

A collection of rollouts is a function of the settings, the current weights and its number alone. So most sources keep
nothing that a checkpoint would have to save: a resumed run asks for the next number. One that samples ahead of training
has collections of earlier weights, which ``state_dict`` hands to the checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.rollouts.record import Rollout


class RolloutError(InputError):
    """A source has no rollouts to give, though the settings are right: servers died, recordings are used up."""


class RolloutSource(ABC):
    """Hands out the rollouts that training is about to learn from. Every rank has one and calls it alike."""

    @abstractmethod
    def next_batch(self, step: int) -> list[Rollout]:
        """Collection number ``step``, counted from 0; whole groups, at least one rollout with a trained token.

        Raises:
            RolloutError: there is none; on all ranks, and nothing of the step has been trained.
        """

    def state_dict(self, wait: bool = True) -> dict[str, Any]:
        """What a checkpoint between two steps must keep, of numbers, strings, lists and tensors.

        Args:
            wait: finish what is being sampled, so that it is kept, too; without, it will be sampled again.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        del state

    def statistics(self) -> dict[str, float]:
        """Metrics of the collection handed out last."""
        return {}

    def timing(self) -> dict[str, float]:
        """Further metrics of it that depend on the clock, so that two equal runs may differ in them."""
        return {}

    def close(self) -> None:
        """End what runs beside training. May be called twice."""
        return


class SampledSource(RolloutSource):
    """Samples rollouts of prompts. A collection may take several batches of prompts, as dynamic sampling does."""

    @abstractmethod
    def sample(self, collection: int, batch: int) -> list[Rollout]:
        """Rollouts of the prompts of batch number ``batch``, for collection number ``collection``.

        Prompts and random numbers follow from the batch; weights, schedules, and what is kept for a number of
        collections go by the collection.
        """

    def next_batch(self, step: int) -> list[Rollout]:
        return self.sample(step, step)


class WrappedSource(RolloutSource):
    """``inner``, of which a subclass changes what it has to."""

    def __init__(self, inner: RolloutSource) -> None:
        self._inner = inner

    def next_batch(self, step: int) -> list[Rollout]:
        return self._inner.next_batch(step)

    def state_dict(self, wait: bool = True) -> dict[str, Any]:
        return self._inner.state_dict(wait)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def statistics(self) -> dict[str, float]:
        return self._inner.statistics()

    def timing(self) -> dict[str, float]:
        return self._inner.timing()

    def close(self) -> None:
        self._inner.close()


class Evaluation(ABC):
    """Judges the current weights on held-out data."""

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics by name, such as ``reward``, after ``step`` optimizer steps; the training noise is not touched."""
