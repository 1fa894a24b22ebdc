"""The short version of ``kill_run.py``: a few random kills of one process and of two, and of every kind of run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY, seed_all

# What is remembered of the steps before, and written beside checkpoints.
KEPT = [
    "--keep-best-checkpoint",
    "eval_reward",
    "--grad-norm-outlier-factor",
    "2",
    "--grad-norm-outlier-action",
    "skip",
]


def kill(folder: Path, *options: str) -> str:
    worker = REPOSITORY / "tests" / "stress" / "kill_run.py"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
    }
    seed = str(int(seed_all(20261120).integers(1 << 30)))
    command = [sys.executable, str(worker), "--seed", seed, "--folder", str(folder), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    return done.stdout


def test_killed_runs_end_like_unbroken_ones(tmp_path: Path) -> None:
    output = kill(tmp_path, "--runs", "async-save", "--kills", "2", "--processes", "1", "2", *KEPT)
    assert output.count("metrics bit for bit the same") == 2


def test_every_kind_of_run_is_killed(tmp_path: Path) -> None:
    kinds = ["plain", "treepo-das", "critic", "async-rollouts"]
    output = kill(tmp_path, "--runs", *kinds, "--kills", "1", "--processes", "2")
    assert output.count("metrics bit for bit the same") == len(kinds)
    assert "4 kills of 4 runs, 4 of which ended as if unbroken" in output
