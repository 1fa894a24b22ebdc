"""Ends a job if one of its processes died or hangs, with a message that names the process.

The error of a collective that waits for a lost rank names only the ranks that waited. Therefore a thread on every rank
writes to the job's key-value store once a second: a heartbeat count, and the number of phases of the loop that the main
thread has entered. Ranks 0 and 1 read the entries of all ranks:

    no new heartbeat within the limit                 the process is dead or stopped
    behind other ranks for longer than the limit      the process hangs in the phase that it entered last

The limit is below the timeout of the collectives (``--distributed-timeout-minutes``), so this message precedes their
error. A slow phase that all ranks are in is not an error. The verdict is written to the store as well, so every rank
ends, even if it is blocked. Ranks of a tensor group wait for each other within one phase. There the collective's own
error comes first, and a second line adds which ranks were outside a collective, and where.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import torch

from megatron_dta.core.model.parallel.mesh import Mesh

_VERDICT = "watchdog/verdict"
_FINISHED = "finished"
_WATCHERS = 2


@dataclass
class _Seen:
    """The last entry that was read from a rank, and the time at which it changed, on the reader's clock."""

    beat: str = ""
    phases: int = 0
    phase: str = "the start"
    beat_changed: float = 0.0
    lags_since: float | None = None
    location: str = ""


class Watchdog:
    """Watches all ranks while its ``with`` block runs; does nothing in a job of one process.

    Args:
        timeout_s: timeout of the collectives in seconds. A lost rank ends the job before this timeout.
    """

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self._mesh, self.limit_s = mesh, 0.8 * timeout_s
        self._interval_s = min(1.0, timeout_s / 20)
        self._phases, self._phase, self._beat = 0, "the start", 0
        self._entered = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, phase: str) -> None:
        """Record that the main thread enters a phase. Every rank enters the same phases in the same order."""
        self._phases, self._phase, self._entered = self._phases + 1, phase, time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._mesh.world_size > 1:
            # Use a separate connection, since a collective that waits on the store blocks the default one.
            self._store = torch.distributed.distributed_c10d._get_default_store().clone()
            now = time.monotonic()
            self._seen = [_Seen(beat_changed=now) for _ in range(self._mesh.world_size)]
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        if isinstance(error, RuntimeError):
            self._explain()
        elif error is None:
            self._write(_FINISHED)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._beat += 1
                self._write(str(self._beat))
                verdict = self._store.get(_VERDICT).decode() if self._store.check([_VERDICT]) else None
                if verdict is None and self._mesh.rank < _WATCHERS:
                    self._read()
                    verdict = self._judge()
            except (RuntimeError, OSError):
                if self._stop.is_set():
                    return
                verdict = "rank 0 or the launcher died: the job's key-value store is gone"
            if verdict is not None:
                self._end(verdict)

    def _write(self, beat: str) -> None:
        self._store.set(f"watchdog/{self._mesh.rank}", f"{beat}|{self._phases}|{self._phase}|{_place_of_main_thread()}")

    def _read(self) -> None:
        now = time.monotonic()
        for rank, seen in enumerate(self._seen):
            key = f"watchdog/{rank}"
            if not self._store.check([key]):
                continue
            beat, phases, seen.phase, seen.location = self._store.get(key).decode().split("|", 3)
            if beat != seen.beat:
                seen.beat, seen.beat_changed = beat, now
            if int(phases) != seen.phases:
                seen.phases, seen.lags_since = int(phases), None
        ahead = max(seen.phases for seen in self._seen)
        for seen in self._seen:
            if seen.phases < ahead and seen.lags_since is None:
                seen.lags_since = now

    def _judge(self) -> str | None:
        now, lost = time.monotonic(), []
        for rank, seen in enumerate(self._seen):
            silent, lag = now - seen.beat_changed, now - (seen.lags_since or now)
            if seen.beat == _FINISHED:
                continue
            if max(silent, lag) > self.limit_s and silent > 5 * self._interval_s:
                lost.append(f"rank {rank} died or was stopped in {seen.phase}: nothing heard of it for {silent:.0f} s")
            elif lag > self.limit_s:
                lost.append(f"rank {rank} hangs in {seen.phase}: the others have waited {lag:.0f} s")
        return "; ".join(lost) or None

    def _end(self, verdict: str) -> None:
        """Report the verdict and end this process; its main thread may be blocked forever."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(_VERDICT, verdict)
            # Give the other ranks time to read the verdict before they lose this process.
            time.sleep(3 * self._interval_s)
        _report(f"error: {verdict}; --distributed-timeout-minutes sets how long a rank may take")
        os._exit(1)

    def _explain(self) -> None:
        """After a failed collective, name the ranks that died, or else the ranks that did not join it."""
        try:
            self._read()
            time.sleep(3 * self._interval_s)
            before = [seen.beat for seen in self._seen]
            self._read()
            if self._store.check([_VERDICT]):
                self._end(self._store.get(_VERDICT).decode())
        except (RuntimeError, OSError):
            _report("error: rank 0 or the launcher died: the job's key-value store is gone")
            return
        others = [(rank, seen) for rank, seen in enumerate(self._seen) if rank != self._mesh.rank]
        silent = [(rank, seen) for rank, seen in others if seen.beat in ("", before[rank]) and seen.beat != _FINISHED]
        away = [(rank, seen) for rank, seen in others if seen.location]
        if silent:
            names = ", ".join(f"rank {rank} in {seen.phase}" for rank, seen in silent)
            _report(f"error: died: {names}; rank {self._mesh.rank} noticed it in {self._phase}")
        elif away and time.monotonic() - self._entered > self.limit_s:
            names = ", ".join(f"rank {rank} in {seen.phase} at {seen.location}" for rank, seen in away)
            _report(f"error: rank {self._mesh.rank} timed out in {self._phase}; not in a collective: {names}")


def _place_of_main_thread() -> str:
    """The current source location of the main thread; empty if it is in a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    if frame is None or f"torch{os.sep}distributed" in frame.f_code.co_filename:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
