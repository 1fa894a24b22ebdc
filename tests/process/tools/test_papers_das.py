"""The DAS experiment at its smallest size: output files, equal samples and curves, counts, reuse of finished runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import REPOSITORY
from forked import run_python

PATHS = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels"), str(REPOSITORY / "benchmarks")])


def run(output: Path) -> tuple[str, list[dict]]:
    """The script's output and its rows."""
    command = ["benchmarks/papers/das.py", "--smallest", "--output-dir", str(output), "--tasks", "long tail"]
    done = run_python(command, env=os.environ | {"PYTHONPATH": PATHS, "DTA_ROLLOUTS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((output / "das.json").read_text())["rows"]


def test_the_smallest_experiment(tmp_path: Path) -> None:
    _, rows = run(tmp_path)
    for name in ("das.md", "das-seconds.png", "das-rewards.png", "das-ablations.png"):
        assert (tmp_path / name).stat().st_size > 0, name
    tables = {key: [row for row in rows if row["table"] == key] for key in ("live", "scope", "window", "budgets")}
    check_live(tables["live"])
    for key, labels in (
        ("scope", {"problem", "global", "both"}),
        ("window", {"1 epoch", "all samples", "by update size, mean 1 epoch"}),
        ("budgets", {"length classes (paper)", "optimal (paper, corrected)", "straggler (ours)", "unlimited"}),
    ):
        assert labels <= {row["setting"] for row in tables[key]}
        check_replays(tables[key])
    unlimited = {row["setting"]: row for row in tables["budgets"]}["unlimited"]
    assert unlimited["forwards"] < unlimited["plain_forwards"]
    assert unlimited["accepted"] > 0
    again, repeated = run(tmp_path)
    assert again.count(": finished earlier") == 2 + len(tables["live"])
    assert repeated == rows


def check_live(rows: list[dict]) -> None:
    plain, *drafted = rows
    assert plain["mode"] == "plain"
    assert {row["mode"] for row in drafted} == {"drafts", "drafts, no clock"}
    for row in drafted:
        assert row["same_samples"] == 1
        assert row["loss_difference"] == 0
        assert row["reward_difference"] == 0
        assert row["rewards"] == plain["rewards"]
        assert row["sampled_tokens"] == plain["sampled_tokens"]
        assert row["accepted"] <= row["drafted"]
        assert row["forwards"] <= row["plain_forwards"]
        assert len(row["seconds_by_batch"]) == len(plain["seconds_by_batch"])
    assert any(row["accepted"] for row in drafted)
    assert any(row["forwards"] < row["plain_forwards"] for row in drafted)


def check_replays(rows: list[dict]) -> None:
    # All replays of a history decode the same samples.
    assert len({(row["samples"], row["plain_forwards"], row["plain_makespan"]) for row in rows}) == 1
    for row in rows:
        assert row["accepted"] <= row["drafted"]
        assert row["wasted"] == row["drafted"] - row["accepted"]
        assert row["forwards"] <= row["plain_forwards"]
