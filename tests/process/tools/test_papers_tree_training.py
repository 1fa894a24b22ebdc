"""The Tree Training experiments at their smallest size: output files, packs and exactness; no timings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY
from forked import run_python

TOOL = REPOSITORY / "benchmarks" / "papers" / "tree_training.py"
PARTS = ("overlap", "packing", "longest-path", "learning-curves")
ROUNDING = 1e-12


def run(*arguments: str):
    path = os.pathsep.join([str(REPOSITORY / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return run_python([TOOL, *arguments], env=os.environ | {"PYTHONPATH": path})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tree_training") / "results"
    done = run("--smallest", "--seeds", "1", "--output-dir", str(found))
    assert done.returncode == 0, done.stderr
    return found


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, list[dict]]:
    found = json.loads((folder / "tree_training.json").read_text())["rows"]
    return {part: [row for row in found if row["table"] == part] for part in PARTS}


def test_files_and_tables(folder: Path, rows: dict[str, list[dict]]) -> None:
    names = {"tree_training.json", "tree_training.md", "tree_training-overlap.png", "tree_training-curves.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(rows.values())
    text = (folder / "tree_training.md").read_text()
    assert text.count("### ") == 5  # the rollout sets are empty here
    assert "6.2x" in text


def test_overlaps_and_bounds(rows: dict[str, list[dict]]) -> None:
    assert [row["overlap"] for row in rows["overlap"]] == pytest.approx([0, 0.25, 0.5, 0.75, 0.9, 0.95], abs=0.02)
    for row in rows["overlap"]:
        assert row["overlap"] == pytest.approx(1 - row["unique_tokens"] / row["tokens"])
        assert row["dense_computed_tokens"] == row["tokens"]
        assert row["dta_computed_tokens"] == row["unique_tokens"] <= row["packed_computed_tokens"] <= row["tokens"]
        assert row["packed_largest_segment"] <= row["pack_capacity"]
        for mode in ("packed", "dta"):
            assert row[f"{mode}_bound"] == pytest.approx(row["dense_tflop"] / row[f"{mode}_tflop"])
            share = row["dense_seconds"] / row[f"{mode}_seconds"] / row[f"{mode}_bound"]
            assert row[f"{mode}_share_of_bound"] == pytest.approx(share)
        assert row["packed_bound"] <= row["dta_bound"] + 1e-9


def test_packs_hold_the_capacity_and_the_better_method_is_taken(rows: dict[str, list[dict]]) -> None:
    for row in rows["packing"]:
        assert row["fullest_pack"] <= row["capacity"]
        each = [row[f"{method}_tokens"] for method in ("contiguous", "leaves_first_fit", "leaves_least_added", "runs")]
        assert row["better_tokens"] == min(each)
        assert row["unique_tokens"] <= row["better_tokens"] <= row["sequence_tokens"]
        assert row["better_packs"] * row["capacity"] >= row["better_tokens"]
    assert any(row["better_tokens"] > row["unique_tokens"] for row in rows["packing"])


def test_trees_have_the_exact_gradient_and_longest_paths_do_not(rows: dict[str, list[dict]]) -> None:
    for row in rows["longest-path"]:
        assert max(row["packed_distance"], row["dta_distance"]) < ROUNDING
        assert row["longest_path_distance"] > 0.01
        assert row["trees"] == 1
        assert row["lost_terms"] == pytest.approx(1 - 1 / row["sequences"])
        assert 0 < row["lost_tokens"] < 1


def test_curves_in_trees_are_those_of_dense_training(rows: dict[str, list[dict]]) -> None:
    ways = {row["way"]: row for row in rows["learning-curves"]}
    assert list(ways) == ["dense", "packed", "dta", "longest path"]
    for way in ("packed", "dta"):
        for name in ("sft_losses", "held_out_losses", "grpo_losses", "rewards"):
            assert np.abs(np.subtract(ways[way][name], ways["dense"][name])).max() < ROUNDING
        assert ways[way]["held_out"] == ways["dense"]["held_out"]
    assert np.abs(ways["dense"]["grpo_losses"]).max() > 1e-6
    assert ways["longest path"]["held_out_loss_difference"] > 1e-3


def test_flags_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    done = run("--smallest", "--steps", "0", "--output-dir", str(tmp_path))
    assert done.returncode == 2
    assert "--steps must be at least 1" in done.stderr.splitlines()[-1]
