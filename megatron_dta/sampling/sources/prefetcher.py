"""A thread that samples collections of rollouts while training goes on, with a bound on how old their weights may be.

    training                          prefetcher
    offers weights of step v   ---->  newest weights offered
    takes collection k         <----  collections sampled: k, k + 1, ...

Collection k is going to be used at some step u(k). It may be sampled with weights of version v as soon as
u(k) - v <= max_staleness, and it is sampled with the newest weights there are then. With a bound of 0 that is only when
training waits for it: the two take turns. Weights change between collections only, so all tokens of a collection are of
one version, which their ``policy_version`` tells.

An error ends the thread; whoever takes the next collection gets it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_dta.model.parallel.mesh import alone
from megatron_dta.rollouts import Rollout


class RolloutPrefetcher:
    """Samples ahead, in a thread of its own.

    Args:
        collect: samples the collection of a number; called in the thread, one at a time.
        update: gives the sampler the weights of a version (from a folder); called in the thread, between collections.
        steps_per_collection: optimizer steps that train a collection.
        max_staleness: most optimizer steps between a collection's weights and the first step that trains it.
        num_collections: how many the run needs in all; no further one is begun ahead.
    """

    def __init__(
        self,
        collect: Callable[[int], list[Rollout]],
        update: Callable[[int, Path | None], None],
        steps_per_collection: int,
        max_staleness: int,
        num_collections: int,
    ) -> None:
        self._collect, self._update = collect, update
        self._steps, self._max_staleness, self._num_collections = steps_per_collection, max_staleness, num_collections
        self._changed = threading.Condition()
        self._ready: dict[int, list[Rollout]] = {}
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._offered: tuple[int, Path | None] | None = None
        self._loaded: int | None = None
        # Collection and step of the last call of ``take``: the others' steps follow from it.
        self._place: tuple[int, int] | None = None
        self._next = 0
        self._error: BaseException | None = None
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="rollout prefetcher", daemon=True)

    def offer(self, version: int, folder: Path | None) -> None:
        """There are new weights."""
        with self._changed:
            self._offered = version, folder
            self._changed.notify_all()

    def take(self, number: int, step: int, timeout_s: float) -> list[Rollout] | None:
        """Collection ``number``, which optimizer step ``step`` (steps done before it) begins to train.

        Returns:
            the rollouts, or None if they are not there after ``timeout_s``: call again.

        Raises:
            Exception: what the thread has failed with.
        """
        with self._changed:
            if self._place is None:
                # Kept by a run with a higher bound, maybe.
                oldest = min((r.policy_version or 0 for r in self._ready.get(number, ())), default=step)
                if self._offered is not None and step - oldest > self._max_staleness:
                    self._ready.clear()
            self._place = number, step
            if number not in self._ready and self._next != number:
                self._ready.clear()
                self._next = number
            self._start()
            self._changed.notify_all()
            self._wait(lambda: number in self._ready, timeout_s)
            return self._ready.pop(number, None)

    def run(self, job: Callable[[], Any]) -> Future[Any]:
        """Call ``job`` in the thread, between two collections, after the newest weights were given to the sampler."""
        done: Future[Any] = Future()
        with self._changed:
            if self._error is not None:
                done.set_exception(self._error)
                return done
            self._jobs.append((job, done))
            self._start()
            self._changed.notify_all()
        return done

    def finish_begun(self, timeout_s: float) -> bool:
        """Whether all collections that the bound allows so far are sampled; waits up to ``timeout_s`` for them."""
        with self._changed:
            self._wait(lambda: not self._may_begin(), timeout_s)
            return not self._may_begin()

    def ready(self) -> dict[int, list[Rollout]]:
        """The collections that are sampled and not taken, by number."""
        with self._changed:
            return dict(self._ready)

    def restore(self, ready: Mapping[int, list[Rollout]]) -> None:
        """Begin with collections of an earlier run, of consecutive numbers; call before the others."""
        self._ready = dict(ready)
        self._next = max(ready, default=-1) + 1

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread; what it is doing is waited for, but not for ever. May be called twice."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _start(self) -> None:
        if not self._thread.is_alive() and self._error is None and not self._stops:
            self._thread.start()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition or an error, the latter is raised if the condition does not hold."""
        end = time.monotonic() + timeout_s
        while not condition() and self._error is None and time.monotonic() < end:
            self._changed.wait(end - time.monotonic())
        if self._error is not None and not condition():
            raise self._error

    def _may_begin(self) -> bool:
        """Whether the next collection may be sampled with the newest weights."""
        if self._offered is None or self._place is None:
            return False
        number, step = self._place
        # What is asked for is sampled in any case: collections with less to train than planned make a run need more.
        if self._next >= self._num_collections and self._next != number:
            return False
        return step + (self._next - number) * self._steps - self._offered[0] <= self._max_staleness

    def _run(self) -> None:
        with alone():
            try:
                while self._work():
                    pass
            except BaseException as error:
                with self._changed:
                    self._error = error
                    for _, done in self._jobs:
                        done.set_exception(error)
                    self._jobs.clear()
                    self._changed.notify_all()

    def _work(self) -> bool:
        """One job or collection; False when the thread is to end."""
        with self._changed:
            while not (self._stops or self._jobs or self._may_begin()):
                self._changed.wait()
            if self._stops:
                return False
            job = self._jobs.popleft() if self._jobs else None
            offered, number = self._offered, self._next
        try:
            if offered is not None and offered[0] != self._loaded:
                self._update(*offered)
                self._loaded = offered[0]
            if job is not None:
                job[1].set_result(job[0]())
                return True
        except BaseException as error:
            if job is not None:
                job[1].set_exception(error)
            raise
        rollouts = self._collect(number)
        with self._changed:
            self._ready[number] = rollouts
            self._next = number + 1
            self._changed.notify_all()
        return True
