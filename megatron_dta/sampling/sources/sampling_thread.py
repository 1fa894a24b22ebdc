"""The thread of a source that samples while training continues."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_dta.core.model.parallel.mesh import alone
from megatron_dta.sampling.host_weights import HostWeights

Job = tuple[Callable[[], Any], Future[Any]]


class SamplingThread(ABC):
    """Calls ``_work`` in a thread until it returns False; used by one thread besides its own.

    Subclasses read ``_offered`` and take from ``_jobs`` while they hold ``_changed``.

    Args:
        name: name of the thread.
        update: gives the sampler the weights of a version; called in the thread.
    """

    def __init__(self, name: str, update: Callable[[int, Path | HostWeights | None], None]) -> None:
        self._update = update
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._offered: tuple[int, Path | HostWeights | None] | None = None
        self._loaded: int | None = None
        self._error: BaseException | None = None
        self._stops = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def offer(self, version: int, weights: Path | HostWeights | None) -> None:
        """Offer the weights of ``version``; the sampler gets the newest ones."""
        with self._changed:
            self._offered = version, weights
            self._changed.notify_all()

    def run(self, job: Callable[[], Any]) -> Future[Any]:
        """Call ``job`` in the thread, with the newest weights, while nothing is sampled."""
        done: Future[Any] = Future()
        with self._changed:
            if self._error is not None:
                done.set_exception(self._error)
                return done
            self._jobs.append((job, done))
            self._start()
            self._changed.notify_all()
        return done

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread, waiting up to ``timeout_s`` for its current work. May be called twice."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _start(self) -> bool:
        """Start the thread if it may run and does not yet; whether it was started now."""
        starts = not self._thread.is_alive() and self._error is None and not self._stops
        if starts:
            self._thread.start()
        return starts

    def _load_offered(self, offered: tuple[int, Path | HostWeights | None] | None) -> None:
        """Give the sampler these weights unless it has them."""
        if offered is not None and offered[0] != self._loaded:
            self._update(*offered)
            self._loaded = offered[0]

    def _run_job(self) -> None:
        """Run the job that waits longest."""
        with self._changed:
            job, done = self._jobs.popleft()
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)
            raise

    def _begin(self) -> None:
        """Prepare, in the thread, for the first piece of work."""
        return

    @abstractmethod
    def _work(self) -> bool:
        """Do one piece of work; False if the thread must end."""

    def _run(self) -> None:
        with alone():
            try:
                self._begin()
                while self._work():
                    pass
            except BaseException as error:
                with self._changed:
                    self._error = error
                    for _, done in self._jobs:
                        done.set_exception(error)
                    self._jobs.clear()
                    self._changed.notify_all()
