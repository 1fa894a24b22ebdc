"""The lock of a run's folder: one job at a time, dead jobs' locks are taken over, on one machine and across several."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conftest import REPOSITORY
from forked import Program, run_python
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint import run_lock
from megatron_dta.training.checkpoint.run_lock import LOCK, RunLock

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])}
HOLD = (
    "import sys, time; from megatron_dta.training.checkpoint.run_lock import RunLock; "
    "RunLock(sys.argv[1]); print(1, flush=True)"
)


@pytest.fixture
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_S", 0.05)
    monkeypatch.setattr(run_lock, "WATCH_S", 0.6)


def other_process(folder: Path) -> subprocess.Popen:
    """A process that holds the folder's lock until it is killed."""
    code = HOLD + "; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], env=ENVIRONMENT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    return process


def named(folder: Path) -> dict[str, object]:
    """What the file says, read by another process: one that closes the file gives its own lock up."""
    return json.loads(subprocess.run(["cat", str(folder / LOCK)], capture_output=True, check=True).stdout)


def test_one_job_at_a_time_and_a_dead_ones_lock_is_taken_over(tmp_path: Path) -> None:
    holder = other_process(tmp_path)
    try:
        with pytest.raises(InputError, match=rf"--save .*another job \(process {holder.pid} on .* give another --save"):
            RunLock(tmp_path)
        assert named(tmp_path)["pid"] == holder.pid
        # Stopped, it still is the one that writes.
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(InputError, match="writes to this folder now"):
            RunLock(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began < run_lock.WATCH_S / 2
        assert named(tmp_path)["pid"] == os.getpid()
        second = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], env=ENVIRONMENT, capture_output=True)
        assert b"InputError: --save" in second.stderr
    assert (tmp_path / LOCK).read_text() == ""


def from_elsewhere(folder: Path, **values: object) -> dict[str, object]:
    """Write what a holder on another machine, whose system keeps its locks to itself, has written."""
    held = {"host": "n7", "boot": "x", "pid": 3, "slurm_job": None, "slurm_restart": "0", "since": "2026-11-22"}
    held |= values
    (folder / LOCK).write_text(json.dumps(held))
    return held


def test_a_live_job_on_another_machine(tmp_path: Path, short_watch: None) -> None:
    from_elsewhere(tmp_path, slurm_job="77")
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.1):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=touch)
    thread.start()
    lines: list[str] = []
    try:
        with pytest.raises(InputError, match=r"another job \(Slurm job 77, process 3 on n7, since 2026-11-22\) writes"):
            RunLock(tmp_path, lines.append)
    finally:
        ended.set()
        thread.join()
    assert len(lines) == 1
    assert "watching for" in lines[0]
    assert named(tmp_path)["host"] == "n7"


def test_a_dead_job_on_another_machine(tmp_path: Path, short_watch: None) -> None:
    from_elsewhere(tmp_path)
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began >= run_lock.WATCH_S
        assert named(tmp_path)["pid"] == os.getpid()
        # Watching has read the file; the lock holds all the same.
        second = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], env=ENVIRONMENT, capture_output=True)
        assert second.returncode == 1


@pytest.mark.parametrize(("restart", "waits"), [("1", False), ("0", True)])
def test_a_requeued_job_takes_its_own_folder_over(
    tmp_path: Path, short_watch: None, monkeypatch: pytest.MonkeyPatch, restart: str, waits: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    from_elsewhere(tmp_path, slurm_job="77", slurm_restart="0")
    began = time.monotonic()
    with RunLock(tmp_path):
        assert (time.monotonic() - began >= run_lock.WATCH_S) == waits


def test_file_systems_without_locks(tmp_path: Path, short_watch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "lockf", no_locks)
    with RunLock(tmp_path):
        pass
    holder = other_process(tmp_path)
    try:
        # It touches the file too seldom for this test.
        monkeypatch.setattr(RunLock, "_is_touched", lambda self: True)
        with pytest.raises(InputError, match=rf"process {holder.pid} on"):
            RunLock(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    monkeypatch.undo()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("content", ["\0" * 50, '{"pid": {}}'])
def test_what_a_crash_left_in_the_file(tmp_path: Path, short_watch: None, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with RunLock(tmp_path):
        assert named(tmp_path)["pid"] == os.getpid()


TRAIN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --task arithmetic "
    "--arithmetic-max-operand 3 --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 3"
)


def test_two_trainers_on_one_folder(tmp_path: Path) -> None:
    """The second one ends before it writes anything, with one line."""
    command = ["-m", "megatron_dta.train", *TRAIN.split(), "--save", tmp_path / "run"]
    first = Program([*command, "--train-iters", 1000000])
    try:
        first.wait_until((tmp_path / "run" / "metrics.jsonl").exists)
        (tmp_path / "run" / "iter_0000001.tmp").mkdir()
        before = sorted(path.name for path in (tmp_path / "run").iterdir())
        second = run_python(command)
        assert second.returncode == 2
        assert second.stderr.startswith(f"error: --save {tmp_path}/run: another job (process {first.pid} on ")
        assert second.stderr.count("\n") == 1
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
