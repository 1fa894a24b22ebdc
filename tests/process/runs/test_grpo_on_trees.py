"""``examples/grpo_on_trees.py``: the library without the trainer trains alike on trees and on separate sequences."""

from __future__ import annotations

from forked import run_python


def run(mode: str) -> list[str]:
    command = ["examples/grpo_on_trees.py", "--steps", "3", "--mode", mode]
    done = run_python(command)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


def test_trees_and_separate_sequences_train_alike() -> None:
    trees, dense = run("dta"), run("dense")
    assert len(trees) == 3
    # Loss, gradient norm and clipped share of every step; what differs is the number of computed tokens.
    assert [line.rsplit("  ", 1)[0] for line in trees] == [line.rsplit("  ", 1)[0] for line in dense]
    assert "26 tokens in 18 computed" in trees[0]
    assert "26 tokens in 26 computed" in dense[0]
