"""The short version of ``kill_run.py``: a few random kills of one process and of two, saves in the background."""

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


def test_killed_runs_end_like_unbroken_ones(tmp_path: Path) -> None:
    seed = int(seed_all(20261120).integers(1 << 30))
    worker = Path(__file__).with_name("kill_run.py")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, str(worker), "--kills", "4", "--processes", "1", "2", "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--async-save", *KEPT], env=environment, capture_output=True, text=True
    )
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    assert done.stdout.count("metrics bit for bit the same") == 2
