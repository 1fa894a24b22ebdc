"""Calls with room on Python's stack of frames.

Python 3.11 keeps frames in chunks of 16 KiB. A loop whose calls cross the end of a chunk maps and unmaps memory at each
of them: that was half of the time of some tests. A frame that needs much gets a large chunk, the rest of which is for
the frames of what it calls.
"""

from collections.abc import Callable
from typing import Any


def call_with_room(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named)


# Half of a chunk of 1 MiB, and a little more.
call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=70_000)
