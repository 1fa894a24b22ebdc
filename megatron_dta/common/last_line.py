"""Repeats an error below torchrun's own report, which is a traceback of thirty lines that names no reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress

_LONGEST_WAIT_S = 60
_WAIT_AND_PRINT = "import select, sys; select.select([int(sys.argv[1])], [], [], {}); sys.stderr.write(sys.argv[2])"


def repeat_after_torchrun(text: str) -> None:
    """Under torchrun, start a process that prints ``text`` on standard error once the launcher has ended.

    The first rank of the node that calls this wins; the others' text is dropped. A batch system that ends a job's
    remaining processes with the launcher also ends this one, so print the text before as well.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    with suppress(OSError), socket.socket(socket.AF_UNIX) as first:
        first.bind(f"\0megatron_dta.error.{launcher}")  # raises OSError if another rank's process still holds it
        ended = os.pidfd_open(launcher)
        subprocess.Popen(
            [sys.executable, "-IS", "-c", _WAIT_AND_PRINT.format(_LONGEST_WAIT_S), str(ended), text],
            pass_fds=(ended, first.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # torchrun ends the process groups of its ranks
        )
