"""``tools/simulate_pipeline.py`` as a user runs it: its figures, its files, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import rollout_file, seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.shapes.decoder import DecoderShape
from tool_runs import Tool

TOOL = Tool("simulate_pipeline")
KEYS = {"segments", "utilisation", "ideal_utilisation", "peak_in_flight_tokens", "bound_utilisation", "digest"}
P = "--pipeline-model-parallel-size"


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 sequences of up to 400 tokens in 4 groups that share a beginning."""
    rng = seed_all(0)
    rows = []
    for _ in range(4):
        trunk = rng.integers(0, 999, 150).tolist()
        for _ in range(6):
            response = rng.integers(0, 999, rng.integers(20, 250)).tolist()
            mask = [0] * len(trunk) + [1] * len(response)
            rows.append({"token_ids": trunk + response, "loss_mask": mask})
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_figures(rollouts: Path) -> None:
    single = TOOL.json(rollouts, P, 1, "--tree-segment-tokens", 64)
    assert (single["utilisation"], single["ideal_utilisation"]) == (pytest.approx(1), 1)
    assert single["peak_in_flight_tokens"] == [single["depth_first_in_flight_tokens"]]
    values = TOOL.json(rollouts, P, 4, "--tree-segment-tokens", 64)
    assert values.keys() >= KEYS
    assert values["ideal_utilisation"] == values["segments"] / (values["segments"] + 3)
    assert values["utilisation"] <= values["bound_utilisation"]
    assert len(values["peak_in_flight_tokens"]) == 4
    assert max(values["peak_in_flight_tokens"]) <= values["in_flight_limit"]
    busy = np.asarray(values["busy_per_stage"])
    assert values["utilisation"] == pytest.approx(busy.sum() / (4 * values["makespan"]))
    assert values["makespan"] < single["makespan"]
    assert values["digest"] == TOOL.json(rollouts, P, 4, "--tree-segment-tokens", 64)["digest"]


def test_the_plan_of_training_is_reported(rollouts: Path) -> None:
    loaded = load_rollouts(rollouts)
    samples = [TrainingSample(*parts) for parts in zip(*trained_parts(loaded), strict=True)]
    costs = CostModel.from_shape(DecoderShape(64, 5120, 25600, 64, 8, 128, 151936))
    for more, budget in ((), StepBudget()), (("--tree-activation-tokens", 0), StepBudget(None, None, 0)):
        values = TOOL.json(rollouts, P, 4, *more)
        step = plan_step(samples, "dta", budget, PipelineShape(4, 1, (16,) * 4, costs))
        assert values["layers_per_stage"] == [16] * 4
        assert values["digest"] == step.training.schedule.digest()
        assert values["makespan"] == pytest.approx(step.training.timeline.makespan)
        assert values["utilisation"] == pytest.approx(step.training.timeline.utilisation)
        assert values["busiest_over_mean"] > 1  # The last stage has the logits beside as many layers.
        assert 0.5 < values["share_of_ideal"] == values["utilisation"] / values["ideal_utilisation"] < 1.1


def test_layers(rollouts: Path) -> None:
    wide = ("--num-layers", 10, "--hidden-size", 64, "--ffn-hidden-size", 64, "--vocab-size", 10**9)
    for more in ((), ("--layers-per-stage", "auto")):
        assert TOOL.json(rollouts, P, 4, *wide, *more)["layers_per_stage"] == [3, 3, 3, 1]
    chosen = TOOL.json(rollouts, P, 4, *wide, "--layers-per-stage", "4,3,2,1")
    assert chosen["layers_per_stage"] == [4, 3, 2, 1]
    busy = chosen["busy_per_stage"]
    np.testing.assert_allclose(np.asarray(busy[:3]) / busy[0], [1, 3 / 4, 2 / 4])


def test_files_and_table(rollouts: Path, tmp_path: Path) -> None:
    plot, trace = tmp_path / "t.png", tmp_path / "t.json"
    done = TOOL(rollouts, P, 2, "--plot", plot, "--trace", trace)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}
    for label in ("utilisation", "ideal N / (N + P - 1)", "upper bound", "static 1F1B", "in-flight", "stages"):
        assert label in done.stdout
    assert "seconds: Qwen3-32B on an H200, operations at assumed rates" in done.stdout
    assert "{" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((P, "2", "--tree-segment-tokens", "0"), ("--tree-segment-tokens", "at least 1")),
        ((P, "2", "--pipeline-in-flight-tokens", "100"), ("--pipeline-in-flight-tokens 100", "longest sequence")),
        ((P, "2", "--layers-per-stage", "3,x"), ("--layers-per-stage 3,x", "'auto'")),
        ((P, "2", "--layers-per-stage", "30,30"), ("--layers-per-stage 30,30", "60", "64")),
    ],
)
def test_bad_input_gets_one_line(rollouts: Path, arguments: tuple, parts: tuple) -> None:
    TOOL.assert_refused(rollouts, *arguments, parts=parts)


def test_a_real_set() -> None:
    values = TOOL.json(rollout_file("tau1_airline_qwen25_3x50.npz"), P, 8, "--sample-granularity", "turn")
    assert values["utilisation"] >= 0.85 * values["ideal_utilisation"]
    assert max(values["peak_in_flight_tokens"]) <= values["in_flight_limit"]
