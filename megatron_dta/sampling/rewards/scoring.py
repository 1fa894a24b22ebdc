"""Computes the rewards of many responses concurrently and handles failures, which are never scored as 0.

A reward that cannot be determined is a failure of the reward function and says nothing about the response: a user
function raised or did not return a finite number, a server did not answer, a program could not be started.
``--rollout-failure`` decides whether a failure stops the run with one line or drops the rollout from training. A
response that is wrong, or whose program does not terminate, has the reward 0.

A function may have two attributes: ``is_concurrent``, whether it may be called from several threads, also while others
are sampled, and ``counts``, a dictionary of its event counts. A batched function (``registry.is_batched``) is called
once for all responses.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from megatron_dta.common import slow_calls
from megatron_dta.common.futures import complete, in_daemon_thread
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.rewards.registry import (
    Response,
    RewardFunction,
    Score,
    compute_score,
    compute_scores,
    is_batched,
)

logger = logging.getLogger(__name__)

_Outcome = Score | InputError


@dataclass(frozen=True)
class Tally:
    """Counts of a scorer so far: events by name, and the sum and number of values of each reward component."""

    counts: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, tuple[float, int]] = field(default_factory=dict)


class Scorer:
    """Calls a reward function.

    Args:
        drop: whether failures drop the rollout instead of ending the run.
        workers: maximum number of concurrent calls, for functions that allow them.
        seconds: timeout of a call; a call that exceeds it has failed, and its thread is abandoned. None: no limit.

    Attributes:
        counts: counts so far on this rank: ``reward_failures``, and the counts of the function.
        last_failure: the line of the last failure.
    """

    def __init__(
        self, function: RewardFunction, drop: bool = False, workers: int = 1, seconds: float | None = None
    ) -> None:
        self._function, self._drop = function, drop
        self._name = getattr(function, "__qualname__", type(function).__qualname__)
        self._workers = workers if getattr(function, "is_concurrent", False) else 1
        self._seconds, self._failures, self._timeouts = seconds, 0, 0
        self._components: dict[str, tuple[float, int]] = {}
        self.last_failure = ""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Response, Future[_Outcome]]] = deque()
        self._working = 0  # threads

    @property
    def counts(self) -> dict[str, int]:
        """See the attributes of the class; empty if nothing is counted."""
        if not self._drop and not hasattr(self._function, "counts"):
            return {}
        timeouts = {} if self._seconds is None else {"reward_timeouts": self._timeouts}
        return {"reward_failures": self._failures, **timeouts, **getattr(self._function, "counts", {})}

    @property
    def tally(self) -> Tally:
        """All counts so far, for ``counted``."""
        return Tally(dict(self.counts), dict(self._components))

    def begin(self, responses: Sequence[Response]) -> list[Future[_Outcome]] | list[None]:
        """Begin to score responses, for ``score``; None for each if the function is not concurrent. Any thread may call
        this."""
        if self._workers == 1 or is_batched(self._function):
            return [None] * len(responses)
        pairs = [(response, Future[_Outcome]()) for response in responses]
        with self._lock:
            self._waiting += pairs
            more = min(self._workers - self._working, len(self._waiting))
            self._working += more
        for _ in range(more):
            in_daemon_thread(self._work, "reward")
        return [future for _, future in pairs]

    def _work(self) -> None:
        """Score the responses that wait."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= 1
                    return
                response, future = self._waiting.popleft()
            try:
                complete(future, self._attempt(response))
            except BaseException as error:  # for the thread that waits
                complete(future, error=error)

    def score(self, responses: Sequence[Response], begun: Sequence[Future[_Outcome] | None] = ()) -> list[float | None]:
        """The reward of each response, in order; None if it failed and its rollout must be dropped. ``begun`` is what
        ``begin`` has returned for each of them.

        Functions that are not concurrent are called in this order, one at a time.

        Raises:
            InputError: a reward failed and failures end the run.
        """
        if not responses:
            return []
        if is_batched(self._function):
            return [self._value(outcome) for outcome in self._batch(responses)]
        futures = [future for future in begun or self.begin(responses) if future is not None]
        if not futures:
            return self._in_turn(responses)
        # All calls finish before an error is raised.
        return [self._value(outcome) for outcome in [future.result() for future in futures]]

    def _in_turn(self, responses: Sequence[Response]) -> list[float | None]:
        """The values of ``_attempt`` for one response after the other."""
        if self._seconds is not None:
            return [self._value(self._attempt(response)) for response in responses]
        values: list[float | None] = []
        with slow_calls.reported(lambda: f"{response.where}: {self._name}", "--reward-timeout") as call:
            for response in responses:
                call.begin_again()
                try:
                    outcome: _Outcome = compute_score(self._function, response)
                except InputError as error:
                    outcome = error
                values.append(self._value(outcome))
        return values

    def _batch(self, responses: Sequence[Response]) -> list[_Outcome]:
        """One call for all responses; if it fails, the reward of each response fails."""
        where = f"reward function, {len(responses)} responses"
        scores = self._in_time(lambda: compute_scores(self._function, responses), lambda: where)
        return [scores] * len(responses) if isinstance(scores, InputError) else scores

    def _attempt(self, response: Response) -> _Outcome:
        return self._in_time(lambda: compute_score(self._function, response), lambda: response.where)

    def _in_time(self, call: Callable[[], Any], where: Callable[[], str]) -> Any:
        """The result of ``call``, its ``InputError``, or an ``InputError`` for a timeout. ``where`` names the call."""

        def attempt() -> Any:
            try:
                return call()
            except InputError as error:
                return error

        if self._seconds is None:
            with slow_calls.reported(lambda: f"{where()}: {self._name}", "--reward-timeout"):
                return attempt()
        future = in_daemon_thread(attempt, "reward")
        wait([future], self._seconds)
        if future.done():
            return future.result()
        with self._lock:
            self._timeouts += 1
        return InputError(f"{where()}: took longer than {self._seconds:g} s")

    def _value(self, outcome: _Outcome) -> float | None:
        if isinstance(outcome, Score):
            for name, number in outcome.components.items():
                total, count = self._components.get(name, (0.0, 0))
                self._components[name] = total + number, count + 1
            return outcome.reward
        if not self._drop:
            raise outcome
        # The first one only: some calls may fail in every batch, and the metrics count them.
        if not self.last_failure:
            logger.warning("a reward failed (--rollout-failure drop): %s", outcome)
        self._failures += 1
        self.last_failure = str(outcome)
        return None


def counted(before: Tally, after: Tally, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
    """Counts between two tallies, summed over the ranks of ``gather``, and the means of the components over the same
    responses as ``reward/NAME``.
    """
    counts = {name: value - before.counts.get(name, 0) for name, value in after.counts.items()}
    components = {}
    for name, (total, number) in after.components.items():
        total_before, number_before = before.components.get(name, (0.0, 0))
        if number > number_before:
            components[name] = total - total_before, number - number_before
    parts = gather((counts, components))
    totals = {name: float(sum(rank_values.get(name, 0) for rank_values, _ in parts)) for name in counts}
    for name in sorted({name for _, rank_values in parts for name in rank_values}):
        sums = [rank_values[name] for _, rank_values in parts if name in rank_values]
        totals[f"reward/{name}"] = sum(total for total, _ in sums) / sum(number for _, number in sums)
    return totals
