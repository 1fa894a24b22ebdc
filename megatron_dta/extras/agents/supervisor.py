"""Runs a command and ends everything that it has started: ``python supervisor.py PARENT SECONDS_TO_END COMMAND ...``.

Processes that leave their group or session, or whose parent ends, become children of this one (a subreaper), so they
are found wherever they went. When the command ends, or this process gets SIGTERM or its parent dies, all of them get
SIGTERM and, after a grace period, SIGKILL. What a service elsewhere starts for the command (containers of a daemon,
``systemd-run``) is not below this process.

The status is the command's, or 128 and the number of the signal that ended it, as in shells. This file imports nothing
of the package, because it is started once for each run of an agent.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

CANNOT_END, CANNOT_START = 125, 126
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAKING = {signal.SIGCHLD, signal.SIGTERM}
_SECONDS_TO_KILL = 10.0
_PAUSE_S = 0.005


def main() -> int:
    """Run the command of the arguments; returns its status."""
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKING)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    statuses: dict[int, int] = {}
    pid = _start(command)
    # A parent that has died before sends no signal.
    while os.getppid() == parent and pid not in statuses and signal.sigwait(_WAKING) != signal.SIGTERM:
        _reap(statuses)
    left = _end(signal.SIGTERM, statuses, grace_s) and _end(signal.SIGKILL, statuses, _SECONDS_TO_KILL)
    if left:
        print(f"processes that cannot be ended: {' '.join(map(str, left))}", file=sys.stderr)
        return CANNOT_END
    status = os.waitstatus_to_exitcode(statuses.get(pid, signal.SIGKILL))
    return 128 - status if status < 0 else status


def _start(command: list[str]) -> int:
    """Start the command in a session of its own; returns its process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKING)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(CANNOT_START)


def _reap(statuses: dict[int, int]) -> bool:
    """Note the statuses of children that have ended; whether there are others."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _end(number: int, statuses: dict[int, int], seconds: float) -> list[int]:
    """Send a signal to all processes below this one; returns those that are left when time is over."""
    deadline, told = time.monotonic() + seconds, set()
    while _reap(statuses):
        pids = _descendants()
        for pid in pids:
            if pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        if time.monotonic() >= deadline:
            return pids
        time.sleep(_PAUSE_S)
    return []


def _descendants() -> list[int]:
    """The processes below this one, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of the program, in parentheses, may contain anything.
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    pids = list(children.get(os.getpid(), []))
    for pid in pids:
        pids.extend(children.get(pid, []))
    return pids


if __name__ == "__main__":
    sys.exit(main())
