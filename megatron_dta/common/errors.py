"""The one exception for bad input: a flag, a rollout file, a checkpoint.

Its message is a single line that says which file, row, field or flag is wrong, what was wrong and what to do;
``InputErrors`` has a line for each of several things. Entry points print it without a traceback and exit with status 2,
so anything else that reaches the user is a defect of this project.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# A disk that is full, a quota that is used up, a limit on files, a file system that only reads.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class InputError(ValueError):
    """The user's input cannot be used; the message names the place and the fix."""


class InputErrors(InputError):  # noqa: N818 (several of them)
    """Several things that are wrong at once; ``messages`` has a line for each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


def raise_all(messages: Iterable[str]) -> None:
    """Raise what is wrong, all of it at once, if anything is."""
    found = tuple(dict.fromkeys(messages))
    if found:
        raise InputErrors(found)


def caught(check: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """What ``check(*arguments)`` raises as ``InputError``, as lines."""
    try:
        check(*arguments)
    except InputErrors as error:
        yield from error.messages
    except InputError as error:
        yield str(error)


def one_line(text: str) -> str:
    """``text`` on one line, with what cannot be printed as escapes: a path or a flag may hold anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def run_entry_point(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with its status. An ``InputError`` becomes one line on standard error (one for each thing
    that is wrong) and status 2, and so does a full disk; Ctrl-C the line ``interrupted`` and status 130, as shells
    have it.

    Of several processes, those after the first name themselves: mostly all of them met the same error, but not always.
    """
    try:
        status = main()
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        for message in error.messages if isinstance(error, InputErrors) else (str(error),):
            start = "error" if rank == "0" else f"error on rank {rank}"
            print(f"{start}: {one_line(message)}", file=sys.stderr)
        status = 2
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {one_line(f'{where}cannot be written ({error.strerror})')}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status or 0)
