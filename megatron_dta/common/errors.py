"""The exception for invalid input, such as flags, rollout files and checkpoints.

Its message is a single line that names the file, row, field or flag, the problem and the fix. ``InputErrors`` has a
line for each of several problems. Entry points print the message without a traceback and exit with status 2. Any other
exception that reaches the user is a bug of this project.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Full disk, exhausted quota, limit on file sizes, read-only file system.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class InputError(ValueError):
    """The user's input is invalid; the message names the place and the fix."""


class InputErrors(InputError):  # noqa: N818 (several of them)
    """Several problems at once; ``messages`` has a line for each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))


def raise_all(messages: Iterable[str]) -> None:
    """Raise one error with all messages, if there are any."""
    found = tuple(dict.fromkeys(messages))
    if found:
        raise InputErrors(found)


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


def run_entry_point(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with its status.

    An ``InputError`` or a full disk is printed on standard error, one line per problem, and gives status 2. Ctrl-C
    prints ``interrupted`` and gives status 130, the convention of shells. With several processes, ranks above 0 add
    their rank to the line, since usually, but not always, all ranks fail with the same error.
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
