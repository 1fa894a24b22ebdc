"""Rewards of many responses: some at once, failures counted and handled, never a silent 0.

A reward that cannot be determined is a failure of whoever determines it and says nothing about the response: the user's
function raised or returned no finite number, a server did not answer, a program could not be started. By
``--reward-failure`` it stops the run with one line, or the rollout is dropped from training. A response that is merely
wrong, or whose program runs for ever, has a reward: 0.

A function may have two attributes: ``is_concurrent``, whether it may be called from several threads, and ``counts``, a
dictionary of what it has counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from megatron_dta.errors import InputError
from megatron_dta.sampling.rewards import RewardFunction, compute_reward


class Response(NamedTuple):
    """A response to score: the prompt's id and record, the text, the token ids."""

    prompt_id: str
    record: Mapping[str, Any]
    text: str
    token_ids: list[int]


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

    def score(self, responses: Sequence[Response]) -> list[float | None]:
        """The reward of each response, in order; None where it failed and is to be dropped.

        Functions that are not concurrent are called in this order, one at a time.

        Raises:
            InputError: a reward failed and failures end the run.
        """
        if self._workers == 1 or len(responses) < 2:
            return [self._value(self._attempt(response)) for response in responses]
        with ThreadPoolExecutor(self._workers, thread_name_prefix="reward") as pool:
            # All are waited for before one of them raises.
            outcomes = list(pool.map(self._attempt, responses))
        return [self._value(outcome) for outcome in outcomes]

    def _attempt(self, response: Response) -> float | InputError:
        if self._seconds is None:
            return self._call(response)
        found: list[float | InputError] = []
        call = threading.Thread(target=lambda: found.append(self._call(response)), name="reward", daemon=True)
        call.start()
        call.join(self._seconds)
        if found:
            return found[0]
        with self._lock:
            self._timeouts += 1
        name, text = response.prompt_id, response.text[:80]
        return InputError(f"reward function, prompt {name!r}, response {text!r}: took longer than {self._seconds:g} s")

    def _call(self, response: Response) -> float | InputError:
        try:
            return compute_reward(self._function, *response)
        except InputError as error:
            return error

    def _value(self, outcome: float | InputError) -> float | None:
        if not isinstance(outcome, InputError):
            return outcome
        if not self._drop:
            raise outcome
        self._failures += 1
        self.last_failure = str(outcome)
        return None


def counted(
    before: Mapping[str, int], after: Mapping[str, int], gather: Callable[[Any], list[Any]]
) -> dict[str, float]:
    """What was counted between two moments, summed over the ranks that ``gather`` asks."""
    own = {name: value - before.get(name, 0) for name, value in after.items()}
    parts = gather(own)
    return {name: float(sum(part.get(name, 0) for part in parts)) for name in own}
