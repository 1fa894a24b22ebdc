"""A process that dies or hangs ends the job in time, with a message that names it."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

import mesh_worker
from forked import forkserver
from megatron_dta.core.config import ParallelConfig
from mesh_worker import run_on_ranks

TIMEOUT_S = 4.0
# By the way in which a rank is lost.
MESSAGES = {
    "killed": "died: rank 1 in 'train' of step 3; rank 0 noticed it in 'update' of step 3",
    "stopped": "rank 1 died or was stopped in 'train' of step 3: nothing heard of it",
    "hangs": "rank 1 hangs in 'train' of step 3: the others have waited",
    "hangs within a phase": "rank 0 timed out in 'train' of step 3; not in a collective: rank 1 in 'train'",
}


def run_and_lose_a_rank(rank: int, argument: tuple[str, Path]) -> None:
    """Steps that end with a collective; in the third one the last rank is lost in the way that is asked for."""
    from datetime import timedelta

    from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
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
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif way == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    time.sleep(600)
            if way == "slow" and step == 2:
                time.sleep(TIMEOUT_S)
            if way != "hangs within a phase":
                watchdog.enter(f"'update' of step {step}")
            torch.distributed.all_reduce(torch.zeros(1), group=group)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The errors that the first rank has printed, by the way in which the other one was lost. All wait at once."""

    def run(way: str) -> list[str]:
        folder = tmp_path_factory.mktemp("ways")
        with pytest.raises(RuntimeError, match="gave no result"):
            run_on_ranks(run_and_lose_a_rank, (way, folder), 2, folder / "run", "gloo")
        lines = (folder / "stderr_0").read_text().splitlines()
        print(way, lines)
        return [line for line in lines if line.startswith("error: ")]

    forkserver()  # before threads ask for it
    with mock.patch.object(mesh_worker, "ENDING_S", 2), ThreadPoolExecutor(len(MESSAGES)) as threads:
        return dict(zip(MESSAGES, threads.map(run, MESSAGES), strict=True))


@pytest.mark.parametrize("way", MESSAGES)
def test_a_lost_rank_is_named_in_time(errors: dict[str, list[str]], way: str) -> None:
    """Late messages are other ones: of a collective that has waited for ``TIMEOUT_S``, or of ranks that do nothing."""
    assert len(errors[way]) == 1
    assert MESSAGES[way] in errors[way][0]


def test_slow_ranks_are_left_alone(tmp_path: Path) -> None:
    assert run_on_ranks(run_and_lose_a_rank, ("slow", tmp_path), 2, tmp_path / "run", "gloo") == [None, None]
    assert not (tmp_path / "stderr_0").read_text()
