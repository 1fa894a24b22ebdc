"""``benchmarks/plan_partition.py`` as a user runs it: its figures, its table, and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import rollout_file, seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.shapes.decoder import DecoderShape
from partition_cases import cost, counts, turns_forest
from tool_runs import Tool

TOOL = Tool("plan_partition", "benchmarks")


def test_figures(tmp_path: Path) -> None:
    """What a step computes: not the three tokens behind the last trained one."""
    sequences, masks, _ = turns_forest(seed_all(1), 7, 3, 4)
    rows = [
        {"token_ids": s.tolist() + [5] * 3, "loss_mask": m.tolist() + [False] * 3}
        for s, m in zip(sequences, masks, strict=True)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = TOOL.json(path, "--data-parallel-size", 5)
    tokens = counts(sequences, masks)[0]
    assert values["unique_tokens"] == tokens
    per_rank = np.array(values["cost_per_rank"])
    assert len(per_rank) == 5
    assert values["max_over_mean"] == pytest.approx(per_rank.max() / per_rank.mean())
    assert values["total_cost"] == pytest.approx(per_rank.sum())
    assert values["duplicated_tokens"] == sum(values["tokens_per_rank"]) - tokens >= 0
    assert sum(values["sequences_per_rank"]) == len(sequences)
    assert values["slowest_rank"] >= values["least_slowest_cost"]
    single = TOOL.json(path, "--data-parallel-size", 1)
    assert single["total_cost"] == pytest.approx(
        cost(CostModel.from_shape(DecoderShape(64, 5120, 25600, 64, 8, 128, 151936)), sequences, masks)
    )
    assert single["costs"].startswith("Qwen3-32B on an H200, operations at assumed rates")
    small = TOOL.json(path, "--data-parallel-size", 1, "--model", "qwen3-1.7b")
    assert small["costs"].startswith("qwen3-1.7b on H200s")
    assert small["total_cost"] < single["total_cost"]
    shared = TOOL.json(path, "--data-parallel-size", 4, "--expert-model-parallel-size", 2, "--tree-segment-tokens", 16)
    assert 0 < shared["slowest_group"] <= shared["even_ranks"]["slowest_group"]
    parts = ("--expert-model-parallel-size 2", "--data-parallel-size 3")
    TOOL.assert_refused(path, "--data-parallel-size", 3, "--expert-model-parallel-size", 2, parts=parts)


def test_a_real_set() -> None:
    path = rollout_file("tau1_airline_gpt4o_4x50.npz")
    values = TOOL.json(path, "--data-parallel-size", 8, "--sample-granularity", "turn")
    assert values["max_over_mean"] <= 1.03
    assert values["idle_ranks"] == 0
