"""A process that dies or hangs ends the job in time, with a message that names it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import mesh_worker
from megatron_dta.config import ParallelConfig
from mesh_worker import run_on_ranks

TIMEOUT_S = 4.0


def run_and_lose_a_rank(rank: int, argument: tuple[str, Path]) -> None:
    """Steps that end with a collective; in the third one the last rank is lost in the way that is asked for."""
    from datetime import timedelta

    from megatron_dta.model import current_mesh, initialize_parallel
    from megatron_dta.training.monitor.watchdog import Watchdog

    way, folder = argument
    os.dup2(os.open(folder / f"stderr_{rank}", os.O_WRONLY | os.O_CREAT), 2)
    initialize_parallel(0, ParallelConfig(distributed_timeout_minutes=TIMEOUT_S / 60))
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    mesh = current_mesh()
    with Watchdog(mesh, TIMEOUT_S) as watchdog:
        for step in range(1, 5):
            watchdog.enter(f"'train' of step {step}")
            if step == 3 and rank == mesh.world_size - 1 and way != "slow":
                time.sleep(1)
                (folder / "lost").write_text(str(time.time()))
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif way == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    time.sleep(60)
            if way == "slow" and step == 2:
                time.sleep(TIMEOUT_S)
            if way != "hangs within a phase":
                watchdog.enter(f"'update' of step {step}")
            torch.distributed.all_reduce(torch.zeros(1), group=group)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("killed", "died: rank 1 in 'train' of step 3; rank 0 noticed it in 'update' of step 3"),
        ("stopped", "rank 1 died or was stopped in 'train' of step 3: nothing heard of it"),
        ("hangs", "rank 1 hangs in 'train' of step 3: the others have waited"),
        (
            "hangs within a phase",
            "rank 0 timed out in 'train' of step 3; not in a collective: rank 1 in 'train'",
        ),
    ],
)
def test_a_lost_rank_is_named_in_time(tmp_path: Path, way: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_worker, "ENDING_S", 2)
    with pytest.raises(RuntimeError, match="gave no result"):
        run_on_ranks(run_and_lose_a_rank, (way, tmp_path), 2, tmp_path / "run", "gloo")
    seconds = time.time() - float((tmp_path / "lost").read_text())
    lines = (tmp_path / "stderr_0").read_text().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    print(errors, seconds)
    assert len(errors) == 1
    assert message in errors[0]
    assert seconds < TIMEOUT_S + 30


def test_slow_ranks_are_left_alone(tmp_path: Path) -> None:
    assert run_on_ranks(run_and_lose_a_rank, ("slow", tmp_path), 2, tmp_path / "run", "gloo") == [None, None]
    assert not (tmp_path / "stderr_0").read_text()
