"""Runs the program in a response against the tests of its prompt (``--reward-function code_tests``).

The program is the last fenced block of the response (```python ... ```), or the whole response if there is none, after
the record's ``code_prefix`` if there is one. The record's tests are texts for standard input with the output that they
must give, or calls of a function with the value that it must return (``code_sandbox.forms``).

The reward is 1 if all tests pass, and 0 if a test fails or if the program raises, runs too long or takes too much
memory; ``code_timeouts`` counts programs that were stopped. If a program cannot be started, or the record has no tests,
the reward has failed (``rewards.scoring``) and is not 0. Nothing that a program does causes such a failure.

Programs run in bubblewrap or on a sandbox server. Where there is neither they do not run, unless
``--code-unconfined`` accepts resource limits as the only barrier.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config.sampling import RewardConfig
from megatron_dta.sampling.rewards.code_sandbox.confinement import system_call_filter
from megatron_dta.sampling.rewards.code_sandbox.forms import ProgramTests, tests_of
from megatron_dta.sampling.rewards.code_sandbox.running import Sandbox
from megatron_dta.sampling.rewards.code_sandbox.service import SandboxService

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Tells whether the limits hold: other sockets than AF_UNIX, threads beyond the limit, files of the system.
_PROBE = """
import os, socket, threading
def probe(limit, folder):
    broken = []
    for family in (socket.AF_INET, 40):
        try:
            broken.append(f"a socket of family {socket.socket(family).family}")
        except OSError:
            pass
    wait = threading.Event()
    try:
        for _ in range(limit + 1):
            threading.Thread(target=wait.wait, daemon=True).start()
        broken.append(f"more than {limit} threads")
    except RuntimeError:
        pass
    if os.path.exists(folder) or os.getuid() == 0 or len(os.listdir("/proc/self/fd")) > 6:
        broken.append("what belongs to the user")
    return broken
"""


class CodeTests:
    """A reward function; see the module's docstring.

    Attributes:
        counts: ``code_timeouts``.
        reach: where programs run, as one line for the log.
    """

    is_concurrent = True

    def __init__(self, settings: RewardConfig) -> None:
        self._lock, self.counts = threading.Lock(), {"code_timeouts": 0}
        reason = _reason_against_bubblewrap(settings)
        self._sandbox: Sandbox | SandboxService = Sandbox(settings, is_confined=not reason)
        where = "in bubblewrap, without network and files of the user"
        if settings.code_sandbox_url:
            self._sandbox = SandboxService(settings, self._sandbox)
            where = "on the servers of --code-sandbox-url"
        elif reason and settings.code_unconfined:
            where = (
                f"with resource limits only, because bubblewrap does not work here ({reason}) and --code-unconfined "
                "is given: they read and write what this user can, end its processes and use the network"
            )
        elif reason:
            raise InputError(
                f"--reward-function code_tests: programs do not run here, because bubblewrap does not work: {reason}; "
                "install bubblewrap 0.8 and allow user namespaces, name a sandbox server (--code-sandbox-url), or "
                "accept programs that only resource limits confine (--code-unconfined)"
            )
        self.reach = f"--reward-function code_tests: programs run {where}"

    def __call__(self, prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
        """1 or 0; ``InputError`` if the program cannot be tested."""
        return float(self.verdict(prompt, str(prompt.get("code_prefix") or "") + program_in(response))["passed"])

    def verdict(self, record: Mapping[str, Any], program: str) -> dict[str, Any]:
        """``passed``, ``stopped``, and of the first failed test, if known, the index (``failed``) and ``output``."""
        tests = tests_of(record)
        try:
            program.encode()
        except UnicodeEncodeError:
            return {"passed": False, "stopped": False}
        verdict = self._sandbox.score(program, tests)
        with self._lock:
            self.counts["code_timeouts"] += verdict["stopped"]
        return verdict


def program_in(response: str) -> str:
    """The last fenced block without a language or marked as Python, or the whole response."""
    blocks = [
        text for language, text in _FENCE.findall(response) if language.lower() in ("", "python", "python3", "py")
    ]
    return blocks[-1] if blocks else response


def _reason_against_bubblewrap(settings: RewardConfig) -> str:
    """Why programs cannot be confined on this machine; empty if they can."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if not system_call_filter():
        return "the system calls of this machine are not known"
    with tempfile.TemporaryDirectory() as folder:
        probe = ProgramTests("probe", [[settings.code_processes, folder]], [[[]]])
        try:
            verdict = Sandbox(settings, is_confined=True).score(_PROBE, probe)
        except InputError as error:
            return str(error)
    return "" if verdict["passed"] else "a first program was not confined"
