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


def within_limit(call: Callable[[], Result], what: str) -> Result:
    """The result of ``call()``; ``TimeLimitError``, which begins with ``what``, if it takes longer than ``SECONDS``.

    The call runs in a thread, which must let other threads run. It cannot be stopped, so after the error it keeps
    running until it ends or the process does.
    """
    outcomes: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((call(), None))
        except BaseException as error:  # Rust's panics are not an ``Exception``
            outcomes.put((None, error))

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        result, error = outcomes.get(timeout=SECONDS)
    except queue.Empty:
        raise TimeLimitError(f"{what}: no result after {SECONDS:.0f} s") from None
    if error is not None:
        raise error
    return result
