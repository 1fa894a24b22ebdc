"""Runs the main function of a command: errors as lines, exit statuses, no credentials and no noise."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator

from megatron_dta.common.last_line import repeat_after_torchrun
from megatron_dta.common.quiet import quieten_libraries
from megatron_dta.common.secrets import redacted
from megatron_dta.core.common.errors import InputError, InputErrors, one_line

# Full disk, exhausted quota, limit on file sizes, read-only file system.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Too long a name, a folder in the place of a file or the reverse, circular links, missing permissions.
_BAD_PATH = {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM}


def run_entry_point(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with its status.

    An ``InputError``, a full disk or an unusable path is printed on standard error, one line per problem, and gives
    status 2. Ctrl-C prints ``interrupted`` and gives status 130, the convention of shells. With several processes,
    ranks above 0 add their rank to the line, since usually, but not always, all ranks fail with the same error. Any
    other exception gives its traceback and status 1. Credentials are hidden in all of them, and libraries' warnings.

    Characters that standard output cannot encode are escaped, so that the text of a token never ends a run.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    quieten_libraries()
    try:
        status = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except Exception as error:
        lines = list(_lines_of(error))
        if lines:
            text = "".join(f"{line}\n" for line in lines)
            print(text, end="", file=sys.stderr, flush=True)
            repeat_after_torchrun(text)
            status = 2
        else:
            print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)
            status = 1
    sys.exit(status or 0)


def _lines_of(error: Exception) -> Iterator[str]:
    """The lines to print instead of a traceback; none for a bug."""
    messages: tuple[str, ...] = ()
    if isinstance(error, InputError):
        messages = error.messages if isinstance(error, InputErrors) else (str(error),)
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:
        messages = (f"{_path_of(error)}cannot be written ({error.strerror})",)
    elif isinstance(error, OSError) and error.errno in _BAD_PATH and error.filename is not None:
        messages = (f"{_path_of(error)}cannot be used ({error.strerror})",)
    rank = os.environ.get("RANK", "0")
    start = "error" if rank == "0" else f"error on rank {rank}"
    for message in messages:
        yield f"{start}: {one_line(redacted(message))}"


def _path_of(error: OSError) -> str:
    return f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) and error.filename else ""
