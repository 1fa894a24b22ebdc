"""Runs the program in a response against the tests of its prompt (``--reward-function code_tests``).

The program is the last fenced block of the response (```python ... ```), or the whole response if there is none. The
prompt's record contains

    tests         Python code that raises if the program is wrong (assertions); it uses what the program defines
    or tests      [{"input": text on standard input, "output": expected standard output}, ...], each a separate run
    code_prefix   optional code before the program, such as the head of the function that it completes

The reward is 1 if all tests pass, and 0 if a test fails or if the program raises, runs too long or takes too much
memory. A program that ends before its tests has not passed. The tests run in a different process than the program
(``code_sandbox``) and compare its return values as data. ``code_timeouts`` counts programs that ran too long, and
``code_unisolated`` those that ran with limits only. If no process can be started, or the record has no tests, the
reward has failed (``rewards.scoring``) and is not 0. Nothing that a program does causes such a failure.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.config.sampling import RewardConfig

MOST_OUTPUT_BYTES = 1 << 20
SANDBOX = Path(__file__).with_name("code_sandbox") / "run.py"
GRACE_SECONDS = 120.0
# bwrap may have rights that this process lacks (AppArmor, set-user-id); otherwise it does the same, slower.
ISOLATIONS = ("namespaces", "bubblewrap", "limits")
_CONFINED = "they read what this user can read, write to a folder of their own only and have no network"
_REACH = {
    "bubblewrap": f"bubblewrap; {_CONFINED}",
    "namespaces": f"namespaces of their own; {_CONFINED}",
    "limits": "limits on time, memory and processes only, because neither user namespaces nor bwrap work here; "
    "without Landlock (all of it: Linux 6.12) they write what this user can write, signal its processes and use the "
    "network",
}
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


class CodeTests:
    """A reward function; see the module's docstring.

    Args:
        isolations: ways to isolate programs; the first that works on this machine is used.
    """

    is_concurrent = True

    def __init__(self, settings: RewardConfig, isolations: tuple[str, ...] = ISOLATIONS) -> None:
        self._settings, self._lock, self._choice = settings, threading.Lock(), threading.Lock()
        self._isolations, self._isolation = isolations, ""
        self.counts = {"code_timeouts": 0, "code_unisolated": 0}

    def __call__(self, prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
        """1 or 0; ``InputError`` if the program cannot be tested."""
        tests, program = _tests_of(prompt), str(prompt.get("code_prefix", "")) + program_in(response)
        if "\0" in program:
            return 0.0
        try:
            program.encode()
        except UnicodeEncodeError:
            return 0.0
        isolation = self.isolation
        verdict = self._judge({"program": program, "tests": tests}, isolation)
        with self._lock:
            self.counts["code_unisolated"] += isolation == "limits"
            self.counts["code_timeouts"] += verdict["stopped"]
        return float(verdict["passed"])

    @property
    def isolation(self) -> str:
        """The way that is used, found by a first program."""
        with self._choice:
            if not self._isolation:
                self._isolation = self._first_that_works()
            return self._isolation

    @property
    def reach(self) -> str:
        """What a program can reach on this machine, as one line for the log."""
        return f"--reward-function code_tests: programs run in {_REACH[self.isolation]}"

    def _first_that_works(self) -> str:
        for isolation in self._isolations:
            try:
                self._judge({"program": "", "tests": "pass"}, isolation)
            except InputError:
                if isolation == self._isolations[-1]:
                    raise
                continue
            return isolation
        raise InputError(f"no way of isolation: {self._isolations}")

    def _judge(self, job: Mapping[str, Any], isolation: str) -> dict[str, Any]:
        """The verdict of the judge; if the judge died without one, the verdict of a stopped program."""
        settings = self._settings
        limits = {
            "cpu_s": math.ceil(settings.code_time_seconds),
            "wall_s": 2 * settings.code_time_seconds + 1,
            "memory": settings.code_memory_mb << 20,
            "file_bytes": MOST_OUTPUT_BYTES,
            "processes": settings.code_processes,
            "isolation": isolation,
            "parent": os.getpid(),
        }
        if isolation == "bubblewrap":
            limits["bwrap"] = shutil.which("bwrap")
            if limits["bwrap"] is None:
                raise InputError("bwrap is not installed")
        runs = 1 if isinstance(job["tests"], str) else len(job["tests"])
        most_seconds = 2 * (runs + 1) * limits["wall_s"] + GRACE_SECONDS
        folder = None
        try:
            if isolation != "namespaces":
                folder = limits["folder"] = tempfile.mkdtemp(prefix="dta-code-")
            return _run(json.dumps(job).encode(), limits, most_seconds)
        except OSError as error:
            raise InputError(f"a program cannot be started: {error.strerror or error}") from error
        finally:
            if folder is not None:
                _remove(folder)


def _run(job: bytes, limits: Mapping[str, Any], most_seconds: float) -> dict[str, Any]:
    # Unnamed files instead of pipes: no process waits for the other end, and no file can be reopened by name.
    with _unnamed() as given, _unnamed() as written, _unnamed() as errors:
        given.write(job)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(SANDBOX), json.dumps(limits)],
            stdin=given,
            stdout=written,
            stderr=errors,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.wait(most_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        written.seek(0)
        lines = written.read().decode(errors="replace").splitlines()
        verdict = {"passed": False, "stopped": True}
        if lines and lines[-1].startswith("{"):
            verdict = json.loads(lines[-1])
        if not lines or "error" in verdict:
            errors.seek(0)
            reason = verdict.get("error") or " ".join(errors.read().decode(errors="replace").split())[-300:]
            raise InputError(f"a program cannot be run within its limits: {reason or f'status {process.returncode}'}")
        return verdict


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the runner, which ends all processes that it started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _unnamed() -> Any:
    return os.fdopen(os.memfd_create("code_tests"), "w+b")


def _remove(folder: str) -> None:
    """Remove a folder even if a program nested it too deeply for ``shutil.rmtree`` or removed its permissions."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def program_in(response: str) -> str:
    """The last fenced block without a language or marked as Python, or the whole response."""
    blocks = [
        text for language, text in _FENCE.findall(response) if language.lower() in ("", "python", "python3", "py")
    ]
    return blocks[-1] if blocks else response


def _tests_of(prompt: Mapping[str, Any]) -> str | list[dict[str, str]]:
    tests = prompt.get("tests")
    if isinstance(tests, str) and tests.strip():
        return tests
    if not isinstance(tests, list) or not tests:
        raise InputError("the prompt's record has no field 'tests', neither code nor a list of inputs and outputs")
    for index, case in enumerate(tests):
        if not isinstance(case, dict) or not all(isinstance(case.get(name), str) for name in ("input", "output")):
            raise InputError(f"the prompt's field 'tests': entry {index} must have 'input' and 'output', both text")
    return tests
