"""Appends the rollouts of closed sessions to a file, so that a killed gateway loses open sessions only.

The rollouts of a session are one write of whole lines. A line that a kill has cut off is removed when the file is
opened again. The file belongs to one gateway at a time.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.extras.agents.gateway.errors import RequestError
from megatron_dta.extras.agents.gateway.records import session_rollouts
from megatron_dta.extras.agents.gateway.session import Session


def lock(file: IO[Any], what: str) -> None:
    """Lock a file until it is closed or the process ends; ``InputError``, which begins with ``what``, if it is."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        reason = "belongs to another gateway that is running" if isinstance(error, BlockingIOError) else error.strerror
        raise InputError(f"{what}: {reason}; give another file") from error


class SessionLog:
    """The file of a gateway.

    Attributes:
        finished, failed: sessions recorded and dropped by this process.
    """

    def __init__(self, path: Path) -> None:
        self._lock, self.finished, self.failed = threading.Lock(), 0, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 (open until ``close``)
        except OSError as error:
            files = [f"{above} is a file, not a folder" for above in path.parents if above.is_file()]
            raise InputError(f"--output {path}: cannot be written ({(files or [error.strerror])[0]})") from error
        lock(self._file, f"--output {path}")
        self._remove_cut_line()

    def _remove_cut_line(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - 2**16)
            self._file.seek(begin)
            piece = self._file.read(end - begin)
            newline = piece.rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        self._file.truncate(end)

    def close_session(self, session: Session, failed: bool) -> None:
        """Record a closed session, or drop it; ``RequestError`` if it has no reward or no call."""
        with self._lock:
            if failed or not session.calls:
                self.failed += 1
                return
            try:
                rollouts = session_rollouts(session, session.reward)
            except ValueError as error:
                self.failed += 1
                raise RequestError(409, f"{error}; the session is dropped") from error
            with tempfile.TemporaryDirectory() as folder:
                write_rollouts(Path(folder) / "session.jsonl", rollouts)
                self._file.write((Path(folder) / "session.jsonl").read_bytes())
            self._file.flush()
            os.fsync(self._file.fileno())
            self.finished += 1

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            self._file.close()
