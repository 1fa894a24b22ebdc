"""A process that dies or hangs is named in time and the job starts again; a wrong flag is named in the last line."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

import mesh_worker
from conftest import REPOSITORY
from forked import Program, forkserver, run_python
from megatron_dta.core.config import ParallelConfig
from megatron_dta.training.monitor.metrics import read_metrics
from mesh_worker import run_on_ranks

LAUNCHER = REPOSITORY / "tests" / "helpers" / "elastic_train.py"
COMMAND = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --tokenizer-type "
    "CharacterTokenizer --rollout-max-response-len 4 --rollout-batch-size 4 --n-samples-per-prompt 2 --train-iters 5 "
    "--save-interval 2 --use-distributed-optimizer"
)
# The second process dies in the middle of its fourth step, the first time.
REWARD = """
import os, pathlib, signal

tracker = pathlib.Path({save!r}) / "latest_checkpointed_iteration.txt"

def reward(prompt, response, token_ids):
    late = tracker.exists() and int(tracker.read_text()) >= 2
    if late and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(set(response))
"""


def test_a_killed_process_is_named_and_the_restart_resumes(tmp_path: Path) -> None:
    save = tmp_path / "save"
    (tmp_path / "reward.py").write_text(REWARD.format(save=str(save)))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{a}+1="}) for a in range(12)))
    files = f"--prompt-data {tmp_path}/prompts.jsonl --reward-function {tmp_path}/reward.py:reward --save {save}"
    done = run_python([LAUNCHER, "2", "1", *COMMAND.split(), *files.split()])
    print(done.stdout[-2000:], done.stderr[-3000:])
    assert done.returncode == 0
    assert "error: died: rank 1 in" in done.stderr
    assert "continuing" in done.stdout
    assert [row["iteration"] for row in read_metrics(save / "metrics.jsonl")] == list(range(1, 6))


def test_the_refusal_is_the_last_line() -> None:
    """Written when the launcher has ended."""
    launcher = Program([LAUNCHER, "1", "0", "--lr", "-1", "--num-layers", "1"])
    wanted, end = "the following arguments are required", time.monotonic() + 60
    while not (launcher.has_ended() and wanted in launcher.stderr().splitlines()[-1]) and time.monotonic() < end:
        time.sleep(0.05)
    done = launcher.wait()
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith("error")
    assert wanted in lines[-1]
    assert any("ChildFailedError" in line for line in lines[:-1])


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
    """The errors that the first rank has printed, by the way in which the other one is lost; all of slow ranks."""
    ways = (*MESSAGES, "slow")  # at once, because all of them wait

    def run(way: str) -> list[str]:
        folder = tmp_path_factory.mktemp("ways")
        with pytest.raises(RuntimeError, match="gave no result") if way in MESSAGES else nullcontext():
            run_on_ranks(run_and_lose_a_rank, (way, folder), 2, folder / "run", "gloo")
        lines = (folder / "stderr_0").read_text().splitlines()
        print(way, lines)
        return [line for line in lines if way == "slow" or line.startswith("error: ")]

    forkserver()  # before threads ask for it
    with mock.patch.object(mesh_worker, "ENDING_S", 2), ThreadPoolExecutor(len(ways)) as threads:
        return dict(zip(ways, threads.map(run, ways), strict=True))


@pytest.mark.parametrize("way", MESSAGES)
def test_a_lost_rank_is_named_in_time(errors: dict[str, list[str]], way: str) -> None:
    """Late messages are other ones: of a collective that has waited for ``TIMEOUT_S``, or of ranks that do nothing."""
    assert len(errors[way]) == 1
    assert MESSAGES[way] in errors[way][0]


def test_slow_ranks_are_left_alone(errors: dict[str, list[str]]) -> None:
    assert errors["slow"] == []
