"""``tools/inspect_tree.py`` as a user runs it: its figures against brute force, its pictures, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from conftest import seed_all
from megatron_dta.core.planning.segments.plan import plan_segments
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.tree import build_prefix_tree
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


def turns_of(rows: list[dict]) -> list[tuple[int, ...]]:
    """Each row's tokens up to the end of each run of trained ones."""
    turns = []
    for row in rows:
        mask = [*map(int, row["loss_mask"]), 0]
        ends = [end for end in range(1, len(mask)) if mask[end - 1] and not mask[end]]
        turns += [tuple(row["token_ids"][:end]) for end in ends]
    return turns


def expected(sequences: list[tuple[int, ...]]) -> dict[str, float]:
    """The figures of the tree by sets of prefixes."""
    prefixes = {sequence[:end] for sequence in sequences for end in range(1, len(sequence) + 1)}
    children: dict[tuple[int, ...], int] = {}
    for prefix in prefixes:
        children[prefix[:-1]] = children.get(prefix[:-1], 0) + 1
    node_ends = [prefix for prefix in prefixes if children.get(prefix, 0) != 1 or prefix in set(sequences)]
    tokens = sum(map(len, sequences))
    return {
        "sequences": len(sequences),
        "tokens": tokens,
        "unique_tokens": len(prefixes),
        "token_reuse": tokens / len(prefixes),
        "attention_reuse": sum(len(s) * (len(s) + 1) // 2 for s in sequences) / sum(map(len, prefixes)),
        "nodes": len(node_ends),
        "leaves": sum(prefix not in children for prefix in prefixes),
        "longest_sequence": max(map(len, sequences)),
    }


@pytest.mark.parametrize(("seed", "sample_granularity"), [(0, "trajectory"), (1, "turn")])
def test_figures_against_sets_of_prefixes(tmp_path: Path, seed: int, sample_granularity: str) -> None:
    rng = seed_all(seed)
    rows = random_rows(rng)
    path = write_rows(tmp_path / "rollouts.jsonl", rows)
    sequences = [tuple(row["token_ids"]) for row in rows] if sample_granularity == "trajectory" else turns_of(rows)
    segment_tokens = 23
    figures = TOOL.json(path, "--sample-granularity", sample_granularity, "--tree-segment-tokens", segment_tokens)
    for key, value in expected(sequences).items():
        assert figures[key] == pytest.approx(value, rel=1e-12), key
    assert figures["build_seconds"] > 0
    assert figures["fill"] == pytest.approx(figures["unique_tokens"] / (figures["segments"] * segment_tokens))

    # In-flight tokens and depth, by walking up from each segment of the same plan.
    tree = build_prefix_tree([np.array(sequence, np.int32) for sequence in sequences])
    plan = plan_segments(tree, segment_tokens)
    starts = plan.segment_start.tolist()
    paths = []
    for segment in range(len(starts) - 1):
        path_to_root = [segment]
        while (token := plan.tree.parent[starts[path_to_root[-1]]]) >= 0:
            path_to_root.append(max(s for s in range(len(starts) - 1) if starts[s] <= token))
        paths.append(path_to_root)
    assert figures["segments"] == len(paths)
    assert figures["segment_depth"] == max(map(len, paths))
    assert figures["peak_in_flight_tokens"] == max(sum(starts[s + 1] - starts[s] for s in way) for way in paths)


def test_limits_and_the_memory_budget_are_used(tmp_path: Path) -> None:
    rng = seed_all(2)
    rows = random_rows(rng)
    path = write_rows(tmp_path / "rollouts.jsonl", rows)
    kept = [row for row in rows if any(row["loss_mask"][:15])][:4]
    figures = TOOL.json(path, "--max-sequences", 4, "--max-length", 15)
    for key, value in expected([tuple(row["token_ids"][:15]) for row in kept]).items():
        assert figures[key] == pytest.approx(value, rel=1e-12), key
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
