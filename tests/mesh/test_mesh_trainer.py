"""The trainer on several processes: same rollouts, same metrics, same weights as one; checkpoints; SIGTERM."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_trainer_cases
from mesh_trainer_cases import SAMPLED, SHARDED, _compare, train_on_rank
from mesh_worker import run_on_ranks
from resume_cases import rows_without_timing

# The fixture, under the name that tests use.
folder = mesh_trainer_cases.folder


@pytest.mark.parametrize("run", ["stored-sp2", "stored-dp2", "stored-cp2", "stored-tp2-dp2"])
def test_metrics_are_those_of_one_process(folder, run):
    _compare(rows_without_timing(folder / run), rows_without_timing(folder / "stored-1"))


@pytest.mark.parametrize("run", ["moved", "moved-cp"])
def test_a_checkpoint_goes_on_on_another_mesh(folder, run):
    """Two steps on a tensor group and two, from their checkpoint, on data-parallel ranks; another padded vocabulary.
    Two on context ranks and two on a tensor group, with divided optimizer states.
    """
    _compare(rows_without_timing(folder / run), rows_without_timing(folder / "stored-1"))


SAMPLED_RUNS = ["sampled-tp2", "sampled-dp2", "sharded-dp2", "sampled-cp2", "sampled-tp2-dp2", "sampled-cp2-dp2"]


@pytest.mark.parametrize("run", SAMPLED_RUNS)
def test_samples_are_those_of_one_process(folder, run):
    rows, expected = rows_without_timing(folder / run), rows_without_timing(folder / "sampled-1")
    _compare(rows, expected)
    assert [row.get("reward") for row in rows[:4]] == [row.get("reward") for row in expected[:4]]


def test_a_run_goes_on_bit_for_bit_on_the_same_mesh(folder):
    """A SIGTERM to one process alone stops all of them after the same step."""
    for optimizer in ("sampled", "sharded"):
        assert rows_without_timing(folder / f"{optimizer}-dp2-cut") == rows_without_timing(folder / f"{optimizer}-dp2")


def test_a_checkpoint_of_the_other_optimizer_is_refused(folder, tmp_path):
    for run, flags, word in (("sharded-dp2", "", "with"), ("sampled-dp2", SHARDED, "without")):
        command = f"{SAMPLED} {flags} --load {folder}/{run} --save {tmp_path}/{run}"
        with pytest.raises(RuntimeError, match=f"was written {word} --use-distributed-optimizer"):
            run_on_ranks(train_on_rank, [(command, None)], 1, tmp_path / f"ranks-{run}")


def test_only_the_first_process_writes(folder):
    for run in ("stored-dp2", "sampled-tp2-dp2"):
        assert [row["iteration"] for row in rows_without_timing(folder / run)] == [0, 1, 2, 3, 4]
        assert np.all([path.suffix != ".tmp" for path in (folder / run).iterdir()])
