"""``tools/inspect_tree.py`` as a user runs it: its figures, its pictures, and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from conftest import seed_all
from megatron_dta.core.planning.segments.plan import plan_segments
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.tree import build_prefix_tree, tree_statistics
from tool_runs import Tool

TOOL = Tool("inspect_tree")


def random_rows(rng: np.random.Generator) -> list[dict]:
    rows = []
    for group in range(3):
        stem = rng.integers(0, 9, 20).tolist()
        for _ in range(5):
            tokens = stem[: int(rng.integers(5, 21))] + rng.integers(0, 2, int(rng.integers(5, 40))).tolist()
            mask = rng.integers(0, 2, len(tokens)).tolist()
            mask[0], mask[-1] = 0, 1
            rows.append({"token_ids": tokens, "loss_mask": mask, "reward": 1.0, "group_id": str(group)})
    return rows + rows[:2]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("granularity", ["trajectory", "turn"])
def test_figures_are_those_of_the_tree_and_the_plan(tmp_path: Path, granularity: str) -> None:
    path = write_rows(tmp_path / "rollouts.jsonl", random_rows(seed_all(1)))
    sequences = [rollout.token_ids for rollout in load_rollouts(path, sample_granularity=granularity)]
    figures = TOOL.json(path, "--sample-granularity", granularity, "--tree-segment-tokens", 23)
    tree = build_prefix_tree(sequences)
    statistics, plan = tree_statistics(tree), plan_segments(tree, 23)
    for name in ("sequences", "tokens", "unique_tokens", "token_reuse", "attention_reuse", "nodes", "leaves"):
        assert figures[name] == getattr(statistics, name), name
    assert figures["build_seconds"] > 0
    assert figures["segments"] == plan.num_segments
    assert figures["fill"] == pytest.approx(tree.num_tokens / (plan.num_segments * 23))
    assert figures["peak_in_flight_tokens"] == plan.peak_in_flight_tokens


def test_limits_and_the_memory_budget_are_used(tmp_path: Path) -> None:
    rng = seed_all(2)
    rows = random_rows(rng)
    path = write_rows(tmp_path / "rollouts.jsonl", rows)
    kept = [row for row in rows if any(row["loss_mask"][:15])][:4]
    figures = TOOL.json(path, "--max-sequences", 4, "--max-length", 15)
    assert (figures["sequences"], figures["tokens"]) == (4, sum(len(row["token_ids"][:15]) for row in kept))
    tight = TOOL.json(path, "--tree-segment-tokens", 16, "--tree-memory-tokens", figures_limit(path, 16))
    assert tight["peak_in_flight_tokens"] <= figures_limit(path, 16)
    TOOL.assert_refused(path, "--tree-segment-tokens", 16, "--tree-memory-tokens", 3, parts=("--tree-memory-tokens",))


def test_a_named_model_tells_the_bytes_of_its_states(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rollouts.jsonl", random_rows(seed_all(5)))
    figures = TOOL.json(path, "--tree-segment-tokens", 8, "--model", "qwen3.5-35b-a3b")
    # 30 layers, each with a state and the gradient in float32 and 3 rows of 8,192 channels in bfloat16 and float32.
    fork = 30 * (2 * 32 * 128 * 128 * 4 + 3 * 8192 * 6)
    assert figures["peak_open_forks"] > 0
    assert figures["peak_state_gib"] == pytest.approx(figures["peak_open_forks"] * fork / 2**30)


def figures_limit(path: Path, segment_tokens: int) -> int:
    """A budget that is always feasible: the longest sequence, and another segment beside each of its segments."""
    return max(len(rollout) for rollout in load_rollouts(path)) + segment_tokens


@pytest.mark.parametrize(
    ("content", "arguments", "parts"),
    [
        ('{"token_ids": [1, 2], "loss_mask": [0, 1]}\n{"token_ids": [1, 2', (), ("rollouts.jsonl", "2")),
        (
            '{"token_ids": [1, 2], "loss_mask": [0, 1]}\n',
            ("--model", "qwen3.5-9b", "--hf-config", "here"),
            ("--hf-config and --model: give one model",),
        ),
    ],
)
def test_bad_input_gets_one_line(tmp_path: Path, content: str, arguments: tuple, parts: tuple) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(content)
    TOOL.assert_refused(path, *arguments, parts=parts)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path, picture = write_rows(tmp_path / "rollouts.jsonl", random_rows(seed_all(6))), tmp_path / "tree.png"
    figures = TOOL.json(path, "--tree-segment-tokens", 23, "--plot", picture)
    pixels = imread(picture)[..., :3]
    assert sorted(tmp_path.iterdir()) == [path, picture]
    assert len(np.unique(pixels.reshape(-1, 3)[::7], axis=0)) > figures["segments"] > 5
