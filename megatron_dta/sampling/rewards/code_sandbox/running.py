"""Runs a program and its judge, and stops what takes too long.

CPU time decides: each process of a test has a limit of the kernel, and the CPU time of all of them is added up. Wall
time stops only programs that wait: time in which no thread of the program or its judge could run. So a program takes
the same decision on a busy machine.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config.sampling import RewardConfig
from megatron_dta.sampling.rewards.code_sandbox import confinement
from megatron_dta.sampling.rewards.code_sandbox.forms import ProgramTests

MOST_OUTPUT_BYTES, MOST_FILES = 8 << 20, 50_000
RUNNER, JUDGE = "run_program.py", "judge.py"
SAMPLE_MS = 100
START_BYTES, JUDGE_BYTES = 64 << 20, 2 << 30
INSIDE = Path(__file__).with_name("inside")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Sandbox:
    """Starts processes on this machine.

    Args:
        settings: the limits.
        is_confined: whether they run within bubblewrap; otherwise with resource limits only.
    """

    # Allowances for the start; waiting and wall time are multiples of a test's limit, which only a hang reaches.
    START_CPU_SECONDS, START_SECONDS, MOST_WAITING, MOST_WALL = 2.0, 10.0, 2.0, 30.0

    def __init__(self, settings: RewardConfig, is_confined: bool) -> None:
        self._settings, self._is_confined = settings, is_confined

    def score(self, program: str, tests: ProgramTests) -> dict[str, Any]:
        """Run ``program``: the judge's verdict (``CodeTests.verdict``)."""
        job = {"program": program, "function": tests.function, "inputs": tests.inputs}
        with ExitStack() as stack:
            stream, sink, errors = *_channel(stack), stack.enter_context(_file())
            job_file = stack.enter_context(_file(json.dumps(job).encode()))
            limits = {"memory": self._settings.code_memory_mb << 20, "processes": self._settings.code_processes}
            runner = self._start(stack, RUNNER, limits, stdin=job_file, stdout=sink, stderr=errors)
            judge, written = self._judge(stack, tests, stream, errors)
            stream.close(), sink.close()
            if self._watch(runner.pid, judge, len(tests.inputs)):  # maybe before the judge has started
                return {"passed": False, "stopped": True}
            return _verdict(written, errors)

    def judge(self, tests: ProgramTests, outcomes: Iterable[bytes]) -> dict[str, Any]:
        """The same verdict on a program that ran elsewhere; ``outcomes`` are read until one is wrong."""
        with ExitStack() as stack:
            stream, sink, errors = *_channel(stack), stack.enter_context(_file())
            judge, written = self._judge(stack, tests, stream, errors)
            stream.close()
            with suppress(BrokenPipeError), sink:
                for outcome in (b"started\n", *outcomes):
                    sink.write(outcome)
                    sink.flush()
            judge.wait()
            return _verdict(written, errors)

    def _judge(self, stack: ExitStack, tests: ProgramTests, stream: BinaryIO, errors: BinaryIO) -> tuple[Any, BinaryIO]:
        seconds, is_json = self._settings.code_timeout, tests.function is not None
        job = {"accepted": tests.accepted, "is_json": is_json, "cpu_s": seconds}
        expected, written = (stack.enter_context(_file(data)) for data in (json.dumps(job).encode(), b""))
        limits = {"memory": JUDGE_BYTES, "processes": 0}
        files = {"stdin": stream, "stdout": written, "stderr": errors}
        return self._start(stack, JUDGE, limits, expected, **files), written

    def _start(
        self, stack: ExitStack, script: str, limits: dict[str, int], *passed: BinaryIO, **files: BinaryIO
    ) -> subprocess.Popen[bytes]:
        """A process that runs this script; it and its descendants end with ``stack``."""
        limits = limits | {
            "cpu_s": math.ceil(self._settings.code_timeout),
            "file_bytes": MOST_OUTPUT_BYTES,
            "packages": site.getsitepackages(),
            "is_confined": self._is_confined,
            "user": confinement.free_user() if self._is_confined else 0,
            "processes": limits["processes"] + (0 if self._is_confined else _threads_of_user()),
        }
        scripts = confinement.SCRIPTS if self._is_confined else str(INSIDE)
        words = [os.path.realpath(sys.executable), "-s", "-S", f"{scripts}/{script}", json.dumps(limits)]
        words += [str(file.fileno()) for file in passed]
        folder = "/"
        if self._is_confined:
            filters = stack.enter_context(_file(confinement.system_call_filter()))
            words = confinement.command(INSIDE, self._settings.code_memory_mb << 20, filters.fileno()) + words
            passed = (*passed, filters)
        else:
            folder = stack.enter_context(_folder())
        descriptors = [file.fileno() for file in passed]
        try:
            process = subprocess.Popen(
                words, env=_ENVIRONMENT, cwd=folder, pass_fds=descriptors, start_new_session=True, **files
            )
        except OSError as error:
            raise InputError(f"a program cannot be started: {error.strerror or error}") from error
        stack.callback(_end, process)
        return process

    def _watch(self, runner: int, judge: subprocess.Popen[bytes], tests: int) -> bool:
        """Wait for the verdict; whether the program was stopped for waiting, or for CPU time or memory in total."""
        limit, memory = self._settings.code_timeout, (self._settings.code_memory_mb << 20) + START_BYTES
        waited, last, ticks = 0.0, time.monotonic(), {}
        end = last + self.START_SECONDS + self.MOST_WALL * limit * (tests + 1)
        ended = os.pidfd_open(judge.pid)
        try:
            watched = select.poll()
            watched.register(ended, select.POLLIN)
            while not watched.poll(SAMPLE_MS):
                now = time.monotonic()
                used, judging = _usage(runner, ticks), _usage(judge.pid, {})
                waited += 0.0 if used.can_run or judging.can_run else now - last
                last = now
                if (
                    waited > self.START_SECONDS + self.MOST_WAITING * limit
                    or used.cpu_s > self.START_CPU_SECONDS + limit * tests
                    or used.memory > memory
                    or used.files > MOST_FILES
                    or now > end
                ):
                    return True
            return False
        finally:
            os.close(ended)


class _Usage(NamedTuple):
    cpu_s: float
    memory: int
    files: int
    can_run: bool


def _usage(pid: int, seen: dict[str, int]) -> _Usage:
    """What a process and its descendants use: CPU time, resident memory, files, and whether a thread of them can run.

    Args:
        seen: ticks of each process so far; the kernel drops those of a process whose parent ignores its end.
    """
    ticks, pages, files, can_run, left = 0, 0, 0, False, [str(pid)]
    while left:
        folder = f"/proc/{(process := left.pop())}"
        with suppress(OSError, IndexError):  # it has ended
            fields = _stat(folder)
            used, of_children = (sum(map(int, fields[first : first + 2])) for first in (11, 13))
            ticks, seen[f"{process} {fields[19]}"] = ticks + used + of_children, used
            pages += int(fields[21])
            for thread in os.listdir(f"{folder}/task"):
                can_run |= _stat(f"{folder}/task/{thread}")[0] == "R"
                with open(f"{folder}/task/{thread}/children", encoding="utf-8") as file:
                    left += file.read().split()
            if os.path.exists(f"{folder}/root{confinement.SCRIPTS}/{JUDGE}"):  # it has entered its namespaces
                spaces = [os.statvfs(f"{folder}/root{path}") for path in ("/tmp", "/dev/shm")]
                files = max(files, sum(space.f_files - space.f_ffree for space in spaces))
    return _Usage(max(ticks, sum(seen.values())) / _TICKS, pages * _PAGE, files, can_run)


def _stat(folder: str) -> list[str]:
    with open(f"{folder}/stat", errors="replace", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()


def _threads_of_user() -> int:
    """The kernel's limit counts all of the user's threads where there is no user namespace."""
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _verdict(written: BinaryIO, errors: BinaryIO) -> dict[str, Any]:
    """The judge's verdict; a failed test if the judge died after the program's start."""
    written.seek(0)
    lines = written.read().decode().splitlines()
    verdict = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"passed": False, "stopped": True}
    if not lines or "error" in verdict:
        errors.seek(0)
        reason = " ".join(errors.read(1 << 16).decode(errors="replace").split())[-300:]
        raise InputError(f"a program cannot be run: {reason or verdict.get('error', 'its judge does not start')}")
    return verdict


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _channel(stack: ExitStack) -> list[BinaryIO]:
    """A channel from a program to its judge: a socket, because a pipe could be opened again through /proc."""
    ends = socket.socketpair()
    return [stack.enter_context(os.fdopen(end.detach(), mode)) for end, mode in zip(ends, ("rb", "wb"), strict=True)]


def _file(data: bytes = b"") -> BinaryIO:
    """An unnamed file in memory: no process waits for its other end, and no name leads to it."""
    file = os.fdopen(os.memfd_create("code_tests"), "w+b")
    file.write(data)
    file.seek(0)
    return file


@contextmanager
def _folder() -> Iterator[str]:
    """A folder for a program that is not confined; ``rm`` removes what Python's ``rmtree`` takes minutes for."""
    folder = tempfile.mkdtemp(prefix="code-tests-")
    try:
        yield folder
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)
