"""Ends a job one of whose processes died or hangs, with a message that names it.

A collective that waits for a lost rank tells only who waited. So every rank has a thread that writes to the job's
key-value store, once a second: a count of its own beats, and how many phases of the loop the main thread has entered.
The first two ranks read what all have written and judge:

    no new beat for the limit                         the process is dead or stopped
    others are phases ahead for the limit             the process hangs in the phase it has entered last

The limit is below the timeout of the collectives (``--distributed-timeout-minutes``), so the name comes before their
error. A slow phase that all ranks are in is nobody's fault and left alone. The verdict goes through the store as well,
so every rank ends, whatever it waits for. Ranks of a tensor group wait for each other inside one phase: there the
collective's own error comes first, and what is added to it is which ranks were in no collective, and where instead.
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

from megatron_dta.model import Mesh

_VERDICT = "watchdog/verdict"
_FINISHED = "finished"
_WATCHERS = 2


@dataclass
class _Seen:
    """What was last read of a rank, and when that changed, on the reader's clock."""

    beat: str = ""
    phases: int = 0
    phase: str = "the start"
    beat_changed: float = 0.0
    lags_since: float | None = None
    place: str = ""


class Watchdog:
    """Watches all ranks while its ``with`` block runs; does nothing in a job of one process.

    Args:
        timeout_s: timeout of the collectives in seconds; a lost rank ends the job before it.
    """

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self._mesh, self.limit_s = mesh, 0.8 * timeout_s
        self._interval_s = min(1.0, timeout_s / 20)
        self._phases, self._phase, self._beat = 0, "the start", 0
        self._entered = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, phase: str) -> None:
        """The main thread begins a phase; every rank goes through the same ones in the same order."""
        self._phases, self._phase, self._entered = self._phases + 1, phase, time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._mesh.world_size > 1:
            # A connection of its own: a collective that waits on the store would hold the other one.
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
            beat, phases, seen.phase, seen.place = self._store.get(key).decode().split("|", 3)
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
        """End this process from outside its main thread, which waits for ever."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(_VERDICT, verdict)
            # The others may lose this process next: let them read why first.
            time.sleep(3 * self._interval_s)
        _report(f"error: {verdict}; --distributed-timeout-minutes sets how long a rank may take")
        os._exit(1)

    def _explain(self) -> None:
        """A collective has failed: name the ranks that are gone, which broke it, or those that stay away."""
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
        gone = [(rank, seen) for rank, seen in others if seen.beat in ("", before[rank]) and seen.beat != _FINISHED]
        away = [(rank, seen) for rank, seen in others if seen.place]
        if gone:
            names = ", ".join(f"rank {rank} in {seen.phase}" for rank, seen in gone)
            _report(f"error: died: {names}; rank {self._mesh.rank} met that in {self._phase}")
        elif away and time.monotonic() - self._entered > self.limit_s:
            names = ", ".join(f"rank {rank} in {seen.phase} at {seen.place}" for rank, seen in away)
            _report(f"error: rank {self._mesh.rank} waited in vain in {self._phase}; in no collective: {names}")


def _place_of_main_thread() -> str:
    """Where the main thread is, empty if in a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    if frame is None or f"torch{os.sep}distributed" in frame.f_code.co_filename:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
