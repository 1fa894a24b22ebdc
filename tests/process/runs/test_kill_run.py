"""A few random kills of one of two processes, in every kind of run."""

from pathlib import Path

from conftest import REPOSITORY, seed_all
from forked import run_python


def test_every_kind_of_run_is_killed(tmp_path: Path) -> None:
    kinds = ["treepo-das", "async-rollouts"]
    options = "--kills 2 --processes 2 --train-iters 4 --keep-best-checkpoint eval_reward"
    worker, seed = REPOSITORY / "tests" / "helpers" / "kill_run.py", int(seed_all(20261120).integers(1 << 30))
    done = run_python([worker, "--seed", str(seed), "--folder", tmp_path, "--runs", *kinds, *options.split()])
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    assert done.stdout.count("metrics bit for bit the same") == len(kinds)
    assert "4 kills of 2 runs, 2 of which ended as if unbroken" in done.stdout
