"""Reports calls of users' functions that take long: one line on the log after a minute, then at doubling intervals.

Such a function may take any time, and a run that waits for one must not look dead. ``is_waiting`` lets the handler of
stop signals know that the step may never end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
"""Seconds after which a call is reported for the first time."""
_WAITING_SECONDS = 1.0


@dataclass
class _Call:
    what: Callable[[], str]
    limited_by: str
    begin: float = 0.0
    next_report: float = 0.0

    def begin_again(self) -> None:
        """Another call begins now, in the block of the last one."""
        self.begin = time.monotonic()
        self.next_report = self.begin + FIRST_SECONDS


_running: dict[int, _Call] = {}
_lock = threading.Lock()
_thread: threading.Thread | None = None


@contextmanager
def reported(what: Callable[[], str], limited_by: str) -> Iterator[_Call]:
    """Report the call in this block while it takes long. Several calls in turn each ``begin_again``.

    Args:
        what: returns the name of the call, for the line on the log.
        limited_by: the flag that limits its time.
    """
    global _thread
    call = _Call(what, limited_by)
    call.begin_again()
    with _lock:
        _running[id(call)] = call
        if _thread is None:
            _thread = threading.Thread(target=_report, name="slow calls", daemon=True)
            _thread.start()
    try:
        yield call
    finally:
        with _lock:
            del _running[id(call)]


def is_waiting() -> bool:
    """Whether a reported call has been running for more than a second; safe in a signal handler."""
    now = time.monotonic()
    return any(now - call.begin > _WAITING_SECONDS for call in list(_running.values()))


def _report() -> None:
    while True:
        with _lock:
            now = time.monotonic()
            due = [call for call in _running.values() if call.next_report <= now]
            reports = [(call.what(), now - call.begin, call.limited_by) for call in due]
            for call in due:
                call.next_report = now + (now - call.begin)
        for report in reports:  # the calls may have ended, or begun again
            logger.warning("%s has been running for %.0f s; %s limits its time", *report)
        time.sleep(min(1.0, FIRST_SECONDS / 4))
