"""The exception for invalid input, such as flags, rollout files and checkpoints.

Its message is a single line that names the file, row, field or flag, the problem and the fix. ``InputErrors`` has a
line for each of several problems. Entry points (``common.entry_point``) print the message without a traceback. Any
other exception that reaches the user is a bug of this project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class InputError(ValueError):
    """The user's input is invalid; the message names the place and the fix."""


class InputErrors(InputError):  # noqa: N818 (several of them)
    """Several problems at once; ``messages`` has a line for each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


def raise_all(messages: Iterable[str]) -> None:
    """Raise one error with all messages, if there are any."""
    lines = tuple(dict.fromkeys(messages))
    if lines:
        raise InputErrors(lines)


def caught(check: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """Yield the lines of the ``InputError`` that ``check(*arguments)`` raises, if any."""
    try:
        check(*arguments)
    except InputErrors as error:
        yield from error.messages
    except InputError as error:
        yield str(error)


def one_line(text: str) -> str:
    """``text`` on one line, with unprintable characters escaped, since paths and flags may contain any character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
