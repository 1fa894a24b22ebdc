"""Futures of calls in daemon threads, and of values that another thread gives.

Threads of a pool are joined when the process ends, also one whose call never returns. Daemon threads are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def in_daemon_thread(call: Callable[[], Answer], name: str) -> Future[Answer]:
    """Run ``call`` in a thread of this name; its future has what it raises, too, and cannot be cancelled."""
    future: Future[Answer] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # also SystemExit of a user's function
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def complete(future: Future[Answer], result: Answer | None = None, error: BaseException | None = None) -> bool:
    """Give a future its error or its result; False if it is done, for example cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return False
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return True
