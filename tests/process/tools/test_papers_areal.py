"""The AReaL-DTA experiment at its smallest size: output files, counts, bounds and balance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from forked import run_python

TOOL = str(REPOSITORY / "benchmarks" / "papers" / "areal_dta.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("areal_dta")
    done = run_python([TOOL, "--smallest", "--seeds", "2", "--output-dir", str(folder)])
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, list[dict]]:
    """The rows of each table."""
    tables: dict[str, list[dict]] = {}
    for row in json.loads((folder / "areal_dta.json").read_text())["rows"]:
        tables.setdefault(row["table"], []).append(row)
    return tables


def test_all_files_appear(folder: Path, rows: dict[str, list[dict]]) -> None:
    assert {path.name for path in folder.iterdir()} == {"areal_dta.json", "areal_dta.md", "areal_dta.png"}
    text = (folder / "areal_dta.md").read_text()
    for heading in ("Modes", "Segment sizes of trees", "Orders of traversal", "Balance over", "Rivals"):
        assert f"### {heading}" in text
    assert "8.31" in text  # the paper's figure, quoted
    assert set(rows) == {"modes", "sizes", "orders", "balance", "balance_sets", "rivals"}
    assert {row["source"].split(":")[0] for row in rows["rivals"]} == {"quoted", "stored"}
    assert all(row["seconds"] > 0 and row["command"] for row in rows["rivals"])


def test_modes_differ_by_their_forests_only(rows: dict[str, list[dict]]) -> None:
    by_sample = {
        sample: {row["mode"]: row for row in rows["modes"] if row["sample"] == sample}
        for sample in ("trajectory", "turn")
    }
    for modes in by_sample.values():
        alone, dense, packed, trees = modes.values()
        assert len({row["tokens"] for row in modes.values()}) == 1
        assert alone["unique_tokens"] == dense["unique_tokens"] == dense["tokens"]
        assert trees["unique_tokens"] <= packed["unique_tokens"] < dense["unique_tokens"]
        assert alone["bound"] == dense["bound"] == dense["speed_up"] == 1
        assert trees["bound"] >= packed["bound"] > 1
        assert alone["recomputed_tokens"] == alone["tokens"]
        for row in modes.values():
            assert row["bound"] == pytest.approx(dense["tflop"] / row["tflop"])
            assert row["loss"] == pytest.approx(dense["loss"], rel=1e-4)
    assert by_sample["turn"]["trees (dta)"]["bound"] > by_sample["trajectory"]["trees (dta)"]["bound"]
    turn, trajectory = (by_sample[sample]["trees (dta)"] for sample in ("turn", "trajectory"))
    assert turn["unique_tokens"] == trajectory["unique_tokens"]


def test_sizes_and_orders_are_in_flight_with_at_least_the_longest_path(rows: dict[str, list[dict]]) -> None:
    for row in rows["sizes"]:
        assert row["peak_in_flight_tokens"] >= row["longest"]
        assert row["segments"] * row["segment_tokens"] >= row["unique_tokens"]
    orders = {(row["order"], row["cut"].split()[0]): row for row in rows["orders"]}
    unique = rows["sizes"][0]["unique_tokens"]
    for (order, _), row in orders.items():
        assert row["in_flight"] >= row["longest"]
        assert row["loss"] == pytest.approx(rows["sizes"][0]["loss"], rel=1e-4)
        assert row["unique_tokens"] > unique if order == "random sequences" else row["unique_tokens"] == unique
    for order in ("sorted", "random children"):
        assert orders[order, "at"]["in_flight"] == orders[order, "at"]["longest"]
        assert orders[order, "at"]["segments"] > orders[order, "every"]["segments"]
        assert orders[order, "every"]["in_flight"] >= orders["the planner's", "planned"]["in_flight"]


def test_balance_is_between_its_bound_and_the_others(rows: dict[str, list[dict]]) -> None:
    others = ("by_cost", "by_tokens", "first_fit")
    for row in rows["balance_sets"]:
        assert 1 - 1e-9 <= row["ours_over_bound"] <= min(row[f"{name}_over_bound"] for name in others) + 1e-6
        assert row["ours_tokens"] <= row["first_fit_tokens"]
        for name in ("ours", *others):
            assert row[f"{name}_tokens"] >= row["unique_tokens"]
            assert row[f"{name}_max_over_mean"] >= 1
    assert {row["ranks"] for row in rows["balance"]} == {2, 4}
    assert all(row["over_bound"] <= row["worst_over_bound"] for row in rows["balance"])


def test_random_orders_hold_the_same_sequences() -> None:
    from megatron_dta.core.tree import build_prefix_tree
    from papers.areal_parts.orders import cut_at_forks, cut_stream, random_children, random_sequences
    from papers.areal_parts.workload import generated_set

    generator = seed_all(5)
    for seed in range(20):
        rollouts = generated_set(seed, 3, 5, 4, 3)
        # Turns are prefixes of each other.
        sequences = [sample.token_ids for sample in rollouts.samples(("trajectory", "turn")[seed % 2])]
        tree = build_prefix_tree(sequences)
        for forest in (random_sequences(tree, sequences, generator), random_children(tree, generator)):
            for index, sequence in enumerate(sequences):
                np.testing.assert_array_equal(forest.token_ids[forest.stream_indices(index)], sequence)
            for plan in (cut_at_forks(forest, 7), cut_stream(forest, 7)):
                assert plan.lengths.max() <= 7
                assert plan.segment_start[-1] == forest.num_tokens >= tree.num_tokens


def test_flags_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    for flags, message in (
        (["--small", "--rollouts", "no/such/folder"], "--rollouts no/such/folder: there is no such folder"),
        (["--smallest", "--steps", "0"], "--steps must be at least 1"),
        (["--smallest", "--tree-memory-gib", "nan"], "--tree-memory-gib must be above 0"),
    ):
        done = run_python([TOOL, *flags, "--output-dir", str(tmp_path)])
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
