"""A few random kills of one of two processes, in every kind of run."""

from pathlib import Path

from conftest import REPOSITORY, seed_all
from forked import run_python

# What is remembered of the steps before, and written beside checkpoints.
KEPT = ["--keep-best-checkpoint", "eval_reward"]


def kill(folder: Path, *options: str) -> str:
    worker = REPOSITORY / "tests" / "helpers" / "kill_run.py"
    seed = str(int(seed_all(20261120).integers(1 << 30)))
    done = run_python([worker, "--seed", seed, "--folder", folder, *options])
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    return done.stdout


def test_every_kind_of_run_is_killed(tmp_path: Path) -> None:
    kinds = ["treepo-das", "async-rollouts"]
    output = kill(tmp_path, "--runs", *kinds, "--kills", "2", "--processes", "2", "--train-iters", "4", *KEPT)
    assert output.count("metrics bit for bit the same") == len(kinds)
    assert "4 kills of 2 runs, 2 of which ended as if unbroken" in output
