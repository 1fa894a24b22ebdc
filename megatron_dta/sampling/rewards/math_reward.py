"""Checks whether the last mathematical answer of a response equals the record's ``answer`` (math_verify).

The package math-verify does the comparison, in separate processes (``math_worker.py``), because a model eventually
writes something like ``9^{9^{9^9}}`` and neither the run nor one of its threads may wait for that. Each process has
limits on CPU time and memory per response. A process that exceeds them is ended, the reward is 0, and ``math_timeouts``
counts it. If the package raises, the reward is also 0, counted by ``math_errors``. An ``answer`` that contains nothing
to compare, and processes that do not start, are failures (``rewards.scoring``).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError

WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 300.0
# Limits per response. CPU time does not depend on the load of the machine; wall time also ends a waiting process.
CPU_SECONDS, WALL_SECONDS = 5, 60.0
MEMORY_BYTES = 4 << 30


class MathVerify:
    """A reward function; see the module's docstring. Concurrent calls use separate processes, started on demand."""

    is_concurrent = True

    def __init__(self, cpu_seconds: int = CPU_SECONDS, wall_seconds: float = WALL_SECONDS) -> None:
        self._cpu_seconds, self._wall_seconds = cpu_seconds, wall_seconds
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self.counts = {"math_timeouts": 0, "math_errors": 0}

    def __call__(self, prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
        """1 or 0; ``InputError`` if the record has no usable answer."""
        if prompt.get("answer") is None:
            raise InputError("the prompt's record has no field 'answer', which this reward compares against")
        answer = prompt["answer"]
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self._cpu_seconds)
        reply = worker.ask({"answer": answer, "response": response}, self._wall_seconds)
        if reply is None:
            worker.end()
            self._count("math_timeouts")
            return 0.0
        with self._lock:
            self._idle.append(worker)
        if "error" in reply:
            raise InputError(f"the prompt's answer {str(answer)[:80]!r} cannot be compared with: {reply['error']}")
        if "raised" in reply:
            self._count("math_errors")
        return float(reply["reward"])

    def close(self) -> None:
        """End the idle processes; they would also end with this process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


class _Worker:
    """One worker process; it ends when its input is closed, so it does not outlive this process."""

    def __init__(self, cpu_seconds: int) -> None:
        # -P: modules beside the script must not shadow others. The search path is the one of this process.
        command = [sys.executable, "-P", str(WORKER), str(cpu_seconds), str(MEMORY_BYTES)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"a process for math-verify cannot be started: {error.strerror or error}") from error
        ready = self._read(START_SECONDS)
        if ready is None or "error" in ready:
            self.end()
            raise InputError(f"a process for math-verify does not start: {(ready or {}).get('error', 'it has ended')}")

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The reply, or None if there is none within ``seconds``."""
        # ASCII-escaped, so that an unpaired surrogate can be sent.
        line = json.dumps(request, default=lambda value: [type(value).__name__]).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            return None
        return self._read(seconds)

    def end(self) -> None:
        """Kill the process."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next line of output."""
        line, out, end = b"", self._process.stdout.fileno(), time.monotonic() + seconds
        while not line.endswith(b"\n"):
            if not select.select([out], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            part = os.read(out, 1 << 16)
            if not part:
                return None
            line += part
        return json.loads(line)
