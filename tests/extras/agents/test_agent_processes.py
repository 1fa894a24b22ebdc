"""Nothing that an agent's program has started outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dta.extras.agents import runs
from megatron_dta.extras.agents.runs import AgentAccess, command_agent

ACCESS = AgentAccess("http://h/v1", "http://h", "http://h/v1/session", "key")
# Each line starts a process that is harder to find than those before, and notes its number.
STARTS = """
sleep 600 & echo $! >> pids
setsid sh -c 'echo $$ >> pids; exec sleep 600' &
(setsid sh -c 'trap "" TERM HUP; (trap "" TERM; sleep 600 & echo $! >> pids; wait) & echo $$ >> pids; wait' &)
setsid env -i sh -c '(echo $$ >> pids; exec sleep 600) > /dev/null 2>&1 < /dev/null &'
while [ $(wc -l < pids) -lt 5 ]; do sleep 0.01; done
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "_SECONDS_TO_END", 0.3)
    (tmp_path / "agent.sh").write_text(f"cd {tmp_path}\n{STARTS}")
    return tmp_path / "agent.sh"


def left_of(script: Path) -> list[int]:
    """The processes that still run, of those that were started."""
    numbers = [int(line) for line in (script.parent / "pids").read_text().split()]
    assert len(numbers) == 5
    return [number for number in numbers if Path(f"/proc/{number}").exists()]


@pytest.mark.parametrize("end", ["echo '{\"reward\": 0.5}'", "exit 7", "kill -9 $$", "sleep 600"])
def test_nothing_is_left(end: str, script: Path) -> None:
    """Whether it ends well, fails, is killed, or takes too long."""
    script.write_text(script.read_text() + end)
    end_of_run = command_agent(f"sh {script}", 30.0 if end != "sleep 600" else 3.0)({}, ACCESS)
    assert not left_of(script)
    failures = {"exit 7": "ended with status 7:", "kill -9 $$": "ended with status 137:", "sleep 600": "took longer"}
    assert (end_of_run.reward, (end_of_run.failure or "")[: len(failures.get(end, ""))]) == (
        (None, failures[end]) if end in failures else (0.5, "")
    )


def test_nothing_outlives_a_killed_run(script: Path) -> None:
    script.write_text(script.read_text() + "sleep 600")
    (script.parent / "run.py").write_text(
        "import os, subprocess, sys\nsubprocess.run([*sys.argv[1:-1], str(os.getpid()), '0.2', 'sh', sys.argv[-1]])\n"
    )
    run = subprocess.Popen([sys.executable, str(script.parent / "run.py"), *runs._SUPERVISOR, str(script)])
    deadline = time.monotonic() + 60
    while not (script.parent / "pids").exists() or len((script.parent / "pids").read_text().split()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    while left_of(script):
        assert time.monotonic() < deadline
        time.sleep(0.05)
