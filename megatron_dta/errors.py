"""The one exception for bad input: a flag, a rollout file, a checkpoint.

Its message is a single line that says which file, row, field or flag is wrong, what was wrong and what to do. Entry
points print it without a traceback and exit with status 2, so anything else that reaches the user is a defect of this
project.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class InputError(ValueError):
    """The user's input cannot be used; the message names the place and the fix."""


def one_line(text: str) -> str:
    """``text`` on one line, with what cannot be printed as escapes: a path or a flag may hold anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def run_entry_point(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with its status; an ``InputError`` becomes one line on standard error and status 2, Ctrl-C
    the line ``interrupted`` and status 130, as shells have it.

    Of several processes, those after the first name themselves: mostly all of them met the same error, but not always.
    """
    try:
        status = main()
    except InputError as error:
        rank, message = os.environ.get("RANK", "0"), one_line(str(error))
        print(f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status or 0)
