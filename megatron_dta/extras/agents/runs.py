"""Runs agents, commands or Python functions, many at once and within a time limit.

A command gets the prompt's record as one line of JSON on standard input and the gateway in its environment:

    OPENAI_BASE_URL, OPENAI_API_KEY          for OpenAI's clients
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY    for Anthropic's
    MEGATRON_DTA_SESSION_URL                 POST {"reward": 1.0} to its /reward, with the same key

It ends with status 0. If the last line of its output is a JSON object with ``reward``, that is the session's reward. A
function is called with the record and ``AgentAccess`` and may return the reward; an exception is a failure.

When a command ends, at the time limit, or with the run, all processes that it has started are ended with it, also those
that left its session (``supervisor``). A function cannot be killed: its session is closed, so its next call fails.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_dta.common.futures import in_daemon_thread
from megatron_dta.common.user_code import load_from_file
from megatron_dta.core.common.errors import InputError, one_line

# Without the user's packages and paths, which take time and could change what it does.
_SUPERVISOR = (sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")))
_SECONDS_TO_END = 3.0
_TAIL_BYTES = 64 * 1024
_TIMEOUT = "took longer than"


@dataclass(frozen=True)
class AgentAccess:
    """How an agent reaches the gateway.

    Attributes:
        base_url: for OpenAI's clients, ends in /v1.
        anthropic_base_url: for Anthropic's clients.
        session_url: ``/reward`` appended to it takes rewards of the session and of its calls.
    """

    base_url: str
    anthropic_base_url: str
    session_url: str
    api_key: str

    def environment(self) -> dict[str, str]:
        """The environment variables of a command."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "MEGATRON_DTA_SESSION_URL": self.session_url,
        }


@dataclass(frozen=True)
class AgentEnd:
    """How a run of an agent ended: its reward, if it gave one, or why it failed."""

    reward: float | None = None
    failure: str | None = None

    @property
    def is_timeout(self) -> bool:
        """Whether it was stopped at the time limit."""
        return self.failure is not None and self.failure.startswith(_TIMEOUT)


def failed_by(error: BaseException) -> AgentEnd:
    """The end of an agent that raised ``error``."""
    return AgentEnd(failure=one_line(f"{type(error).__name__}: {error}")[:300])


Agent = Callable[[Mapping[str, Any], AgentAccess], AgentEnd]


def command_agent(command: str, seconds: float) -> Agent:
    """The agent of ``--agent-command``; ``InputError`` if there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--agent-command: cannot be divided into words: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise InputError(f"--agent-command {command!r}: there is no program {words[0] if words else ''!r}")

    def run(record: Mapping[str, Any], access: AgentAccess) -> AgentEnd:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(dict(record), default=str).encode() + b"\n")
            stdin.seek(0)
            supervised = [*_SUPERVISOR, str(os.getpid()), str(_SECONDS_TO_END), *words]
            try:
                process = subprocess.Popen(
                    supervised,
                    stdin=stdin,
                    stdout=output,
                    stderr=errors,
                    env=os.environ | access.environment(),
                    start_new_session=True,
                )
            except OSError as error:
                return AgentEnd(failure=f"cannot be started: {error.strerror}")
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return AgentEnd(failure=f"{_TIMEOUT} {seconds:g} s")
            finally:
                # It ends all that it has started, within a limited time.
                process.terminate()
                process.wait()
            if status:
                last = _tail(errors).rstrip().rpartition("\n")[2]
                return AgentEnd(failure=one_line(f"ended with status {status}: {last}")[:300])
            return _printed_reward(_tail(output))

    return run


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    return file.read().decode("utf-8", "replace")


def _printed_reward(output: str) -> AgentEnd:
    last = output.rstrip().rpartition("\n")[2]
    try:
        printed = json.loads(last)
    except ValueError:
        return AgentEnd()
    if not isinstance(printed, dict) or "reward" not in printed:
        return AgentEnd()
    return _checked(printed["reward"])


def _checked(reward: Any) -> AgentEnd:
    is_number = isinstance(reward, bool | int | float | np.number)
    if not is_number or not np.isfinite(float(reward)):
        return AgentEnd(failure=one_line(f"gave the reward {reward!r}, which is not a finite number")[:300])
    return AgentEnd(float(reward))


def callable_agent(spec: str, seconds: float) -> Agent:
    """The agent of ``--agent-callable``; ``InputError`` if there is no such function."""
    path, _, name = spec.rpartition(":")
    function = load_from_file(f"--agent-callable {spec}", path, name)

    def run(record: Mapping[str, Any], access: AgentAccess) -> AgentEnd:
        call = in_daemon_thread(lambda: function(dict(record), access), "agent")
        wait([call], seconds)
        if not call.done():
            return AgentEnd(failure=f"{_TIMEOUT} {seconds:g} s")
        if call.exception() is not None:
            return failed_by(call.exception())
        return AgentEnd() if call.result() is None else _checked(call.result())

    return run
