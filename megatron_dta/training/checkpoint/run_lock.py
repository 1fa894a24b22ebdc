"""Locks a run's folder, so that only one job at a time writes to it.

``SAVE/lock`` is held from before the first write until the job ends:

    {"host": "n1", "boot": "9c1e...", "pid": 4711, "slurm_job": "123", "slurm_restart": "0", "since": "2026-..."}

Rank 0 of a job holds an operating-system lock on the file. The system releases it when the process ends for any reason.
Some network file systems do not show such locks to other machines, so the file also names its holder, and the holder
touches it every few seconds. If the system lock is free but the file names a job on another machine, the new job
watches the file and takes it over if it is no longer touched. A requeued Slurm job takes over its own earlier lock at
once.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError

LOCK = "lock"
TOUCH_S = 5.0
# A holder on another machine is considered dead if it has not touched the file for this many seconds.
WATCH_S = 6 * TOUCH_S
_MAX_BYTES = 4096
# Error numbers that file systems without locks return.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunLock:
    """The lock of a run's folder, held from construction until ``release`` or the end of the process.

    Args:
        report: called with a line if the constructor has to wait to see whether the holder is alive.

    Raises:
        InputError: another job holds it.
    """

    def __init__(self, folder: str | Path, report: Callable[[str], None] = lambda line: None) -> None:
        self._folder, self._path = folder, Path(folder) / LOCK
        self._ended = threading.Event()
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"--save {folder}: cannot be written ({error.strerror})") from error
        try:
            self._take(report)
        except OSError as error:
            os.close(self._file)
            raise InputError(f"{self._path}: cannot be written ({error.strerror})") from error
        except BaseException:
            os.close(self._file)
            raise
        self._heart = threading.Thread(target=self._touch, name="run lock", daemon=True)
        self._heart.start()
        atexit.register(self.release)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the folder for the next job."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.release)
        self._heart.join()
        with suppress(OSError):
            # The file is not deleted: a waiting job may have it open and would then lock a deleted file.
            self._write("")
        os.close(self._file)

    def _take(self, report: Callable[[str], None]) -> None:
        has_locks = self._lock()
        # Read through the open descriptor: closing any other descriptor of the file would release the system lock.
        holder = _parsed(os.pread(self._file, _MAX_BYTES, 0))
        if holder is not None and not _is_surely_dead(holder, has_locks):
            report(f"--save {self._folder}: {_named(holder)} has not released this folder; watching for {WATCH_S:g} s")
            if self._is_touched():
                raise _held(self._folder, holder)
            has_locks = self._lock()
        self._write(json.dumps(_myself()))
        if not has_locks:
            self._break_tie()

    def _lock(self) -> bool:
        """Take the system lock; returns whether the file system supports locks."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _held(self._folder, _parsed(os.pread(self._file, _MAX_BYTES, 0))) from None
            raise
        return True

    def _is_touched(self) -> bool:
        """Watch the file for ``WATCH_S`` seconds; returns whether its holder is alive."""
        before, deadline = self._stamp(), time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, WATCH_S / 10))
            if self._stamp() != before:
                return True
        return False

    def _stamp(self) -> tuple[int, bytes]:
        """Modification time and content of the file, read again from the file server."""
        with open(self._path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read(_MAX_BYTES)

    def _break_tie(self) -> None:
        """Without system locks, the last of several simultaneous writers holds the lock; the others raise."""
        time.sleep(min(2.0, WATCH_S / 10))
        holder, mine = _parsed(self._stamp()[1]), _myself()
        if holder is None or any(holder.get(name) != mine[name] for name in ("host", "boot", "pid")):
            raise _held(self._folder, holder)

    def _write(self, text: str) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)
        os.fsync(self._file)

    def _touch(self) -> None:
        while not self._ended.wait(TOUCH_S):
            # The file server may be unavailable for a while.
            with suppress(OSError):
                os.utime(self._file)


def _is_surely_dead(holder: dict[str, Any], has_locks: bool) -> bool:
    """Whether a holder without a system lock is certainly dead, so that the file need not be watched."""
    mine = _myself()
    if holder.get("boot") == mine["boot"] and mine["boot"]:
        # Locks between processes of one machine always work, regardless of the file system.
        return has_locks or holder.get("pid") == mine["pid"]
    # Slurm restarts a job only after its previous start has ended.
    is_same_job = mine["slurm_job"] is not None and holder.get("slurm_job") == mine["slurm_job"]
    return is_same_job and holder.get("slurm_restart") != mine["slurm_restart"]


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _boot() -> str:
    """The boot id of this machine, which is the same in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _parsed(content: bytes) -> dict[str, Any] | None:
    """The holder that the file names; None if the lock was released or the content is not valid."""
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return holder if isinstance(holder, dict) else None


def _named(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "another job"
    job = f"Slurm job {holder['slurm_job']}, " if holder.get("slurm_job") else ""
    return f"another job ({job}process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')})"


def _held(folder: str | Path, holder: dict[str, Any] | None) -> InputError:
    return InputError(
        f"--save {folder}: {_named(holder)} writes to this folder now; wait until it ends, or give another --save"
    )
