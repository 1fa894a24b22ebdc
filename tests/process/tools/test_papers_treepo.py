"""The TreePO experiment at its smallest size: output files, equal budgets, counts, reuse of finished runs."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from conftest import REPOSITORY
from forked import run_python
from megatron_dta.core.common.errors import InputError
from papers.processes import Job, Processes
from papers.training import make_data
from papers.treepo_parts.curves import AXES, Curve, comparison

PARTS = ("curves", "ablations", "efficiency", "votes", "runs")


def run(folder: Path, *arguments: object) -> CompletedProcess[str]:
    paths = os.pathsep.join(str(REPOSITORY / part) for part in ("", "kernels", "benchmarks"))
    environment = os.environ | {"PYTHONPATH": paths}
    command = ["benchmarks/papers/treepo.py", "--smallest", "--jobs", "2", "--output-dir", folder, *arguments]
    return run_python(command, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("papers") / "treepo"
    done = run(found)
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def rows(folder: Path, table: str) -> list[dict]:
    return [row for row in json.loads((folder / "treepo.json").read_text())["rows"] if row["table"] == table]


def test_tables_and_plots_are_written(folder: Path):
    text = (folder / "treepo.md").read_text()
    assert all(rows(folder, part) for part in PARTS)
    assert text.count("\n### ") + text.startswith("### ") == len(PARTS)
    assert all((folder / name).stat().st_size for name in ("treepo.png", "treepo-sampling.png"))


def test_both_methods_have_the_same_budget(folder: Path):
    found = {row["method"]: row for row in rows(folder, "runs")}
    assert set(found) == {"GRPO", "TreePO"}
    largest_step = max(row["tokens_of_last_step"] for row in found.values())
    assert abs(found["GRPO"]["decoded_tokens"] - found["TreePO"]["decoded_tokens"]) < largest_step
    for row in found.values():
        points = row["points"]
        assert points["tokens"][-1] == row["decoded_tokens"]
        assert all(np.all(np.diff(points[axis]) > 0) for axis in ("tokens", "sampling", "seconds"))
        assert all(sampling <= total for sampling, total in zip(points["sampling"], points["seconds"], strict=True))


def test_leaves_are_worth_no_more_than_they_are(folder: Path):
    for table in ("runs", "ablations", "efficiency"):
        for row in rows(folder, table):
            assert 0 < row["effective_leaves"] <= row["leaves"] + 1e-9
            assert 0 <= row["fallback_share"] < 1
    alone = [row for row in rows(folder, "efficiency") if row["method"] == "independent"]
    assert all(row["effective_leaves"] == row["leaves"] and row["trajectories_per_second_ratio"] == 1 for row in alone)


def test_a_tree_decodes_no_more_than_its_leaves_hold(folder: Path):
    shares = {row["method"]: row["decoded_share"] for row in rows(folder, "runs")}
    assert shares["GRPO"] == 1
    assert shares["TreePO"] < 1


def test_the_same_command_repeats_no_run(folder: Path):
    # An interrupted run has no result; its folder is made anew.
    (folder / "runs" / "ablation-2" / "result.json").unlink()
    before = rows(folder, "runs")
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GRPO-1: finished earlier" in done.stdout
    assert "ablation-2: finished earlier" not in done.stdout
    assert rows(folder, "runs") == before


def test_a_failed_part_names_its_error_and_others_end_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "")  # restored at the end
    processes = Processes(tmp_path, ["papers.training"])
    processes.begin(Job("more", make_data, {"flags": ["--count", "1000000000"]}))
    with pytest.raises(InputError, match=r"data has failed: error: --base 1: must be 2 to 10 \(.*log.txt\)"):
        processes.run(Job("data", make_data, {"flags": ["--base", "1"]}))
    assert len(multiprocessing.active_children()) == 1  # beside the failed one
    processes.close()
    assert not multiprocessing.active_children()
    assert not any((tmp_path / name / "result.json").exists() for name in ("data", "more"))


def test_costs_of_a_reward_are_interpolated():
    values, reward = np.array([0.0, 10.0, 20.0, 40.0]), np.array([0.2, 0.1, 0.5, 0.5])
    curve = Curve({"tokens": values, "sampling": values / 2, "seconds": values / 2}, reward)
    assert curve.reaches("tokens", 0.3) == 15
    assert curve.reaches("tokens", 0.2) == 0
    assert curve.reaches("tokens", 0.6) is None
    slow = Curve(dict.fromkeys(AXES, 2 * values), reward)
    # With a budget that one of them has not reached, both count up to where it was ended.
    for budget in (40, 100):
        first, second = comparison({"GRPO": {1: slow}, "TreePO": {1: curve}}, "GRPO", budget)
        assert first["tokens"] == second["tokens"] == 40
        assert first["target"] == second["target"] == 0.45
        assert (first["tokens_saved"], second["tokens_saved"]) == (0, 0.5)
        assert (first["reward_at_equal_seconds"], second["reward_at_equal_seconds"]) == (0.1, 0.5)
