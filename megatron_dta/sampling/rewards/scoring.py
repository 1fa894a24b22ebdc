"""Rewards of many responses: some at once, failures counted and handled, never a silent 0.

A reward that cannot be determined is a failure of whoever determines it and says nothing about the response: the user's
function raised or returned no finite number, a server did not answer, a program could not be started. By
``--reward-failure`` it stops the run with one line, or the rollout is dropped from training. A response that is merely
wrong, or whose program runs for ever, has a reward: 0.

A function may have two attributes: ``is_concurrent``, whether it may be called from several threads, and ``counts``, a
dictionary of what it has counted. A batched function (``rewards.is_batched``) is called once for all responses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.sampling.rewards.registry import (
    Response,
    RewardFunction,
    Score,
    compute_score,
    compute_scores,
    is_batched,
)

_Outcome = Score | InputError


@dataclass(frozen=True)
class Tally:
    """What a scorer has counted so far: events, and for each component of rewards its sum and how many there were."""

    counts: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, tuple[float, int]] = field(default_factory=dict)


class Scorer:
    """Calls a reward function.

    Args:
        drop: failures drop the rollout and do not end the run.
        workers: calls at once, of functions that allow it.
        seconds: a call that takes longer has failed; it goes on in a thread that nobody waits for. None: no limit.

    Attributes:
        counts: so far, on this rank: ``reward_failures``, and what the function counts.
        last_failure: the line of the last failure.
    """

    def __init__(
        self, function: RewardFunction, drop: bool = False, workers: int = 1, seconds: float | None = None
    ) -> None:
        self._function, self._drop = function, drop
        self._workers = workers if getattr(function, "is_concurrent", False) else 1
        self._seconds, self._failures, self._timeouts = seconds, 0, 0
        self._components: dict[str, tuple[float, int]] = {}
        self.last_failure = ""
        self._lock = threading.Lock()

    @property
    def can_fail(self) -> bool:
        """Whether there is something to count."""
        return self._drop or hasattr(self._function, "counts")

    @property
    def counts(self) -> dict[str, int]:
        """See on top; empty where nothing is counted."""
        if not self.can_fail:
            return {}
        timeouts = {} if self._seconds is None else {"reward_timeouts": self._timeouts}
        return {"reward_failures": self._failures, **timeouts, **getattr(self._function, "counts", {})}

    @property
    def tally(self) -> Tally:
        """All of what is counted, so far, for ``counted``."""
        return Tally(dict(self.counts), dict(self._components))

    def score(self, responses: Sequence[Response]) -> list[float | None]:
        """The reward of each response, in order; None where it failed and is to be dropped.

        Functions that are not concurrent are called in this order, one at a time.

        Raises:
            InputError: a reward failed and failures end the run.
        """
        if not responses:
            return []
        if is_batched(self._function):
            return [self._value(outcome) for outcome in self._batch(responses)]
        if self._workers == 1 or len(responses) < 2:
            return [self._value(self._attempt(response)) for response in responses]
        with ThreadPoolExecutor(self._workers, thread_name_prefix="reward") as pool:
            # All are waited for before one of them raises.
            outcomes = list(pool.map(self._attempt, responses))
        return [self._value(outcome) for outcome in outcomes]

    def _batch(self, responses: Sequence[Response]) -> list[_Outcome]:
        """One call for all responses; what fails it fails each of them."""
        where = f"reward function, {len(responses)} responses"
        found = self._in_time(lambda: compute_scores(self._function, responses), where)
        return [found] * len(responses) if isinstance(found, InputError) else found

    def _attempt(self, response: Response) -> _Outcome:
        return self._in_time(lambda: compute_score(self._function, response), response.where)

    def _in_time(self, call: Callable[[], Any], where: str) -> Any:
        """What ``call`` returns, or its ``InputError``, or one that says that it took too long."""

        def attempt() -> Any:
            try:
                return call()
            except InputError as error:
                return error

        if self._seconds is None:
            return attempt()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(attempt()), name="reward", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if found:
            return found[0]
        with self._lock:
            self._timeouts += 1
        return InputError(f"{where}: took longer than {self._seconds:g} s")

    def _value(self, outcome: _Outcome) -> float | None:
        if isinstance(outcome, Score):
            for name, number in outcome.components.items():
                total, count = self._components.get(name, (0.0, 0))
                self._components[name] = total + number, count + 1
            return outcome.reward
        if not self._drop:
            raise outcome
        self._failures += 1
        self.last_failure = str(outcome)
        return None


def counted(before: Tally, after: Tally, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
    """What was counted between two moments, summed over the ranks that ``gather`` asks, and the means of components
    over the same, as ``reward/NAME``.
    """
    counts = {name: value - before.counts.get(name, 0) for name, value in after.counts.items()}
    components = {}
    for name, (total, number) in after.components.items():
        total_before, number_before = before.components.get(name, (0.0, 0))
        if number > number_before:
            components[name] = total - total_before, number - number_before
    parts = gather((counts, components))
    found = {name: float(sum(own.get(name, 0) for own, _ in parts)) for name in counts}
    for name in sorted({name for _, own in parts for name in own}):
        sums = [own[name] for _, own in parts if name in own]
        found[f"reward/{name}"] = sum(total for total, _ in sums) / sum(number for _, number in sums)
    return found
