"""Limits the time of calls into code that came with a model: regular expressions and templates may never end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from megatron_dta.core.common.errors import InputError

Result = TypeVar("Result")

SECONDS = 30.0


class TimeLimitError(InputError):
    """A call took longer than ``SECONDS``."""


class _Worker:
    """A thread that makes one call after another, until this object is dropped."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Callable[[], object], queue.Queue] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self.calls,), name="within a time limit", daemon=True)
        self.thread.start()

    def __del__(self) -> None:
        self.calls.put(None)


def _work(calls: queue.SimpleQueue) -> None:
    while (job := calls.get()) is not None:
        call, outcomes = job
        try:
            outcomes.put((call(), None))
        except BaseException as error:  # Rust's panics are not an ``Exception``
            outcomes.put((None, error))
        del job, call, outcomes


_LOCAL = threading.local()


def within_limit(call: Callable[[], Result], what: str) -> Result:
    """The result of ``call()``; ``TimeLimitError``, which begins with ``what``, if it takes longer than ``SECONDS``.

    The call runs in another thread, one for each thread that calls this; it must let other threads run. It cannot be
    stopped, so after the error it keeps running until it ends or the process does.
    """
    worker = getattr(_LOCAL, "worker", None)
    if worker is None or not worker.thread.is_alive():  # threads do not survive a fork
        worker = _LOCAL.worker = _Worker()
    outcomes: queue.Queue[tuple[Result, None] | tuple[None, BaseException]] = queue.Queue()
    worker.calls.put((call, outcomes))
    try:
        result, error = outcomes.get(timeout=SECONDS)
    except BaseException as error:
        _LOCAL.worker = None
        if not isinstance(error, queue.Empty):
            raise
        raise TimeLimitError(f"{what}: no result after {SECONDS:.0f} s") from None
    if error is not None:
        raise error
    return result
