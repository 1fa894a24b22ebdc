"""``tools/plan_partition.py`` as a user runs it: its figures, its table, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import rollout_file, seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.shapes.decoder import DecoderShape
from partition_cases import cost, counts, turns_forest
from tool_runs import Tool

TOOL = Tool("plan_partition")
METHOD_KEYS = {"cost_per_rank", "max_over_mean", "total_cost", "duplicated_tokens", "seconds"}
GOOD = '{"token_ids": [1, 2], "loss_mask": [0, 1]}\n'


def write_turns(path: Path, seed: int) -> tuple[Path, list, list, list[str]]:
    sequences, masks, names = turns_forest(seed_all(seed), 7, 3, 4)
    rows = [
        {"token_ids": s.tolist() + [5] * 3, "loss_mask": m.tolist() + [False] * 3, "group_id": name, "reward": 1.0}
        for s, m, name in zip(sequences, masks, names, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, sequences, masks, names


@pytest.mark.parametrize("seed", [0, 1])
def test_figures(tmp_path: Path, seed: int) -> None:
    """What a step computes: not the three tokens behind the last trained one."""
    path, sequences, masks, names = write_turns(tmp_path / "rollouts.jsonl", seed)
    values = TOOL.json(path, "--data-parallel-size", 5)
    tokens = counts(sequences, masks)[0]
    assert values["unique_tokens"] == tokens
    assert values.keys() >= METHOD_KEYS
    per_rank = np.array(values["cost_per_rank"])
    assert len(per_rank) == 5
    assert values["max_over_mean"] == pytest.approx(per_rank.max() / per_rank.mean())
    assert values["total_cost"] == pytest.approx(per_rank.sum())
    assert values["duplicated_tokens"] == sum(values["tokens_per_rank"]) - tokens >= 0
    assert sum(values["sequences_per_rank"]) == len(sequences)
    assert values["seconds"] > 0
    assert max(values["cost_per_rank"]) >= values["least_slowest_cost"]
    single = TOOL.json(path, "--data-parallel-size", 1)
    assert single["total_cost"] == pytest.approx(
        cost(CostModel.from_shape(DecoderShape(64, 5120, 25600, 64, 8, 128, 151936)), sequences, masks)
    )
    assert single["costs"].startswith("Qwen3-32B on an H200, operations at assumed rates")
    assert single["duplicated_tokens"] == 0
    grouped = TOOL.json(path, "--data-parallel-size", 9, "--keep-together", "group")
    assert grouped["idle_ranks"] >= 9 - len(set(names))


def test_the_model_and_the_framing_are_used(tmp_path: Path) -> None:
    path, *_ = write_turns(tmp_path / "rollouts.jsonl", 2)
    small = TOOL.json(path, "--data-parallel-size", 3, "--model", "qwen3-1.7b")
    assert small["costs"].startswith("qwen3-1.7b on H200s")
    assert small["total_cost"] < TOOL.json(path, "--data-parallel-size", 3)["total_cost"]
    rows = [
        {"token_ids": list(range(40)), "loss_mask": [int(i in (9, 19, 39)) for i in range(40)]},
        {"token_ids": [*range(30), 7], "loss_mask": [int(i == 30) for i in range(31)]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for sample_granularity, sequences in (("trajectory", 2), ("turn", 4)):
        values = TOOL.json(path, "--data-parallel-size", 2, "--sample-granularity", sample_granularity)
        assert (values["sequences"], values["unique_tokens"]) == (sequences, 41)
    together = TOOL.json(
        path, "--data-parallel-size", 4, "--sample-granularity", "turn", "--keep-together", "trajectory"
    )
    assert sorted(together["sequences_per_rank"]) == [0, 0, 1, 3]
    assert TOOL.json(path, "--data-parallel-size", 2, "--max-sequences", 1, "--max-length", 15)["tokens"] == 10


def test_ranks_that_share_experts() -> None:
    path = rollout_file("tau2_airline_7x50.npz")
    flags = ("--data-parallel-size", 4, "--model", "qwen3-1.7b", "--max-sequences", 60)
    shared = (*flags, "--expert-model-parallel-size", 4, "--tree-segment-tokens", 4096)
    values = TOOL.json(path, *shared)
    assert values["slowest_group"] < values["even_ranks"]["slowest_group"]
    even = TOOL.json(path, *flags)
    assert values["even_ranks"]["cost_per_rank"] == even["cost_per_rank"]
    assert "slowest_group" not in even
    assert "slowest group" in TOOL(path, *shared).stdout


@pytest.mark.parametrize(
    ("content", "arguments", "parts"),
    [
        (GOOD + '{"token_ids": [1, 2', ("--data-parallel-size", "2"), ("rollouts.jsonl", "2")),
        (GOOD, ("--data-parallel-size", "0"), ("--data-parallel-size", "at least 1")),
        (
            GOOD,
            ("--data-parallel-size", "3", "--expert-model-parallel-size", "2"),
            ("--expert-model-parallel-size 2", "--data-parallel-size 3"),
        ),
        (
            GOOD,
            ("--data-parallel-size", "2", "--tree-segment-tokens", "9"),
            ("--tree-segment-tokens", "--expert-model-parallel-size"),
        ),
    ],
)
def test_bad_input_gets_one_line(tmp_path: Path, content: str, arguments: tuple, parts: tuple) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(content)
    TOOL.assert_refused(path, *arguments, parts=parts)


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    path, *_ = write_turns(tmp_path / "rollouts.jsonl", 4)
    TOOL.assert_loads_no_torch(path, "--data-parallel-size", 3)


def test_a_real_set(tmp_path: Path) -> None:
    values = TOOL.json(
        rollout_file("tau1_airline_gpt4o_4x50.npz"), "--data-parallel-size", 8, "--sample-granularity", "turn"
    )
    assert values["max_over_mean"] <= 1.03
    assert values["idle_ranks"] == 0
