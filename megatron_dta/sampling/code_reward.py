"""``--reward-function code_tests``: runs the program in a response against the tests of its prompt.

The program is the last fenced block of the response (```python ... ```), or all of it where there is none. The prompt's
record holds

    tests         Python code that raises where the program is wrong (assertions); runs behind the program
    or tests      [{"input": text on standard input, "output": expected standard output}, ...], each a run of its own
    code_prefix   optional, code in front of the program, such as the head of the function that it completes

The reward is 1 where all tests pass and 0 where one does not, where the program raises, runs too long, or takes too
much memory. A program that ends before its tests did has not passed. Counted: ``code_timeouts`` (the program ran too
long) and ``code_unisolated`` (it ran where no namespace of its own was to be had, so with a network). If no process can
be started, or the record has no tests, the reward has failed (``sampling.scoring``): that is not 0.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megatron_dta.config.reward import RewardConfig
from megatron_dta.errors import InputError

MOST_OUTPUT_BYTES = 1 << 20
SANDBOX = Path(__file__).with_name("code_sandbox.py")
_STOPPED = [
    sign * number + offset for number in (signal.SIGXCPU, signal.SIGKILL) for sign, offset in ((-1, 0), (1, 128))
]
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Runs the files beside it; then, and only then, says the word that stands in one pipe into the other.
_HARNESS = """\
import os, sys
def run(say=int(sys.argv[1]), word=int(sys.argv[2]), write=os.write, read=os.read):
    names = {"__name__": "__main__"}
    for file in ("program.py", "tests.py"):
        with open(file, encoding="utf-8") as source:
            exec(compile(source.read(), file, "exec"), names)
    write(say, read(word, 100))
run()
"""


class CodeTests:
    """A reward function; see on top."""

    is_concurrent = True

    def __init__(self, settings: RewardConfig) -> None:
        self._settings, self._lock = settings, threading.Lock()
        self.counts = {"code_timeouts": 0, "code_unisolated": 0}

    def __call__(self, prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
        """1 or 0; ``InputError`` where the program cannot be judged."""
        tests, program = _tests_of(prompt), str(prompt.get("code_prefix", "")) + program_in(response)
        if "\0" in program:
            return 0.0
        try:
            program.encode()
        except UnicodeEncodeError:
            return 0.0
        if isinstance(tests, str):
            return float(self._passes(program, tests))
        return float(all(self._prints(program, case["input"], case["output"]) for case in tests))

    def _passes(self, program: str, tests: str) -> bool:
        word = secrets.token_hex(16)
        files = {"program.py": program, "tests.py": tests, "harness.py": _HARNESS}
        code, _, said = self._run(files, "harness.py", "", word)
        return code == 0 and said == word

    def _prints(self, program: str, given: str, expected: str) -> bool:
        code, printed, _ = self._run({"program.py": program}, "program.py", given, "")
        return code == 0 and _lines(printed) == _lines(expected)

    def _run(self, files: Mapping[str, str], main: str, given: str, word: str) -> tuple[int, str, str]:
        """Exit status, standard output, and what the harness said."""
        with tempfile.TemporaryDirectory(prefix="dta-code-", ignore_cleanup_errors=True) as name, ExitStack() as pipes:
            folder = Path(name)
            for file, text in files.items():
                (folder / file).write_text(text, encoding="utf-8")
            (folder / "input").write_text(given, encoding="utf-8", errors="replace")
            said, heard, status = (_Pipe(pipes) for _ in range(3))
            heard.write(word)
            code = self._wait(folder, main, said.into, heard.out, status.into)
            told = status.read()
            if not told:
                reason = " ".join((folder / "errors").read_text(errors="replace").split())[-300:]
                raise InputError(f"a program cannot be run within its limits: {reason or f'status {code}'}")
            if told.strip() != "isolated":
                self._count("code_unisolated")
            if code in _STOPPED:
                self._count("code_timeouts")
            with (folder / "output").open("rb") as file:
                return code, file.read(MOST_OUTPUT_BYTES).decode(errors="replace"), said.read()

    def _wait(self, folder: Path, main: str, said: int, heard: int, status: int) -> int:
        """Run until the end or the time limit; the exit status, that of SIGKILL where it had to be stopped."""
        settings = self._settings
        limits = (math.ceil(settings.code_time_seconds), settings.code_memory_mb << 20, MOST_OUTPUT_BYTES)
        command = [sys.executable, "-I", str(SANDBOX), *map(str, (*limits, settings.code_processes, status))]
        command += [sys.executable, "-I", "-X", "utf8", main, str(said), str(heard)]
        with (
            (folder / "input").open("rb") as given,
            (folder / "output").open("wb") as output,
            (folder / "errors").open("wb") as errors,
        ):
            try:
                process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=output,
                    stderr=errors,
                    cwd=folder,
                    env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                    pass_fds=(said, heard, status),
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"a program cannot be started: {error.strerror or error}") from error
            try:
                return process.wait(2 * settings.code_time_seconds + 1)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL
            finally:
                # Whatever it has started and left behind goes with it.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


class _Pipe:
    """A pipe whose ends close with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        self.out, self.into = os.pipe()
        stack.callback(os.close, self.out)
        stack.callback(os.close, self.into)

    def write(self, text: str) -> None:
        """Fits into a pipe's buffer: short text only."""
        os.write(self.into, text.encode())

    def read(self) -> str:
        """What is in it now."""
        os.set_blocking(self.out, False)
        try:
            return os.read(self.out, 1000).decode(errors="replace")
        except BlockingIOError:
            return ""


def program_in(response: str) -> str:
    """The last fenced block that is not of another language, or the whole response."""
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


def _lines(text: str) -> list[str]:
    """Blanks at the ends of lines and of the text do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
