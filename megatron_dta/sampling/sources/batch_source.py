"""Defines the interface of rollout sources, stored files or samplers, and of evaluations.

A rollout batch is a function only of the settings, the current weights and its number. So most sources have no state
for a checkpoint to save: a resumed run asks for the next number. A source that samples ahead of training holds batches
from earlier weights, which ``state_dict`` returns for the checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout


class RolloutError(InputError):
    """A source cannot return rollouts although the settings are valid, such as when servers died."""


class RolloutSource(ABC):
    """Returns the rollouts for training. Every rank has a source and makes the same calls."""

    @abstractmethod
    def next_batch(self, step: int) -> list[Rollout]:
        """Rollout batch number ``step``, from 0: whole groups, with at least one trained token.

        Raises:
            RolloutError: there is no batch; raised on all ranks, before any part of the step has been trained.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint between two steps, made of numbers, strings, lists and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        del state

    def statistics(self) -> dict[str, float]:
        """Metrics of the rollout batch returned last."""
        return {}

    def timing(self) -> dict[str, float]:
        """Metrics of the rollout batch returned last that depend on the clock, so equal runs may differ in them."""
        return {}

    def close(self) -> None:
        """Stop background work. May be called twice."""
        return


class SampledSource(RolloutSource):
    """Samples rollouts of prompts. A rollout batch may take several prompt batches, as in dynamic sampling."""

    @abstractmethod
    def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
        """Rollouts of prompt batch number ``prompt_batch`` for rollout batch number ``rollout_batch``.

        The prompt batch determines prompts and random numbers. The rollout batch determines weights and schedules, and
        it is the unit in which state ages.
        """

    def next_batch(self, step: int) -> list[Rollout]:
        return self.sample(step, step)


class Evaluation(ABC):
    """Evaluates the current weights on held-out data."""

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics by name, such as ``reward``, after ``step`` optimizer steps; the random state of training stays."""
