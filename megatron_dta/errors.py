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


def run_entry_point(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with its status; an ``InputError`` becomes one line on standard error and status 2.

    Of several processes, those after the first name themselves: mostly all of them met the same error, but not always.
    """
    try:
        status = main()
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
        status = 2
    sys.exit(status or 0)
