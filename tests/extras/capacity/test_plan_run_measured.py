"""The planner against what H200s measured (``benchmarks/step_*.json``): memory within 5%, seconds of a step within 15%.

The shares of the peaks that are reached by default were fitted to these steps (within 8%); memory was not. It is
within 3%, as pipelines are scheduled by the costs that training knows: seconds are those of the cluster, but what is in
flight follows from the schedule.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from conftest import REPOSITORY, rollout_file
from megatron_dta.core.planning.costs.element_bytes import LOGIT_ELEMENTS
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import Cluster
from megatron_dta.extras.capacity.memory import FIXED_BYTES, StateSettings
from megatron_dta.extras.capacity.meshes import Choice, MeshSizes, make_mesh
from megatron_dta.extras.capacity.search import Planner
from megatron_dta.extras.capacity.step_time import mesh_costs
from megatron_dta.extras.capacity.work import StepWork
from megatron_dta.families.named_shapes import SHAPES

FILE = "tau1_airline_gpt4o_4x50"


@pytest.fixture(autouse=True)
def _half_the_logits_as_in_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGIT_ELEMENTS, "cuda", 1 << 27)


def measured_steps() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, settings, row) of each measured step whose segments were cut as the settings say."""
    steps = []
    for path in sorted((REPOSITORY / "benchmarks" / "results").glob("step_*h200.json")):
        values = json.loads(path.read_text())
        for run in values.get("runs", [values]):
            settings = run.get("settings", {})
            files = settings.get("files", [settings.get("file", "")])
            is_fixed = settings.get("tree_segment_tokens") and settings.get("tree_memory_tokens")
            if is_fixed and settings["model"] in SHAPES and len(files) == 1 and FILE in files[0]:
                steps += [(f"{path.stem}-{len(steps)}-{row['mode']}", settings, row) for row in run["rows"]]
    return steps


@pytest.mark.parametrize(("settings", "row"), [pytest.param(s, r, id=name) for name, s, r in measured_steps()])
def test_prediction(settings: dict[str, Any], row: dict[str, Any]) -> None:
    rollouts = load_rollouts(rollout_file(f"{FILE}.npz"), max_sequences=settings["max_sequences"])
    shape = SHAPES[settings["model"]]
    shape = replace(shape, qk_layernorm=True)  # All shapes are measured with it.
    cluster = Cluster(settings["processes"], gpus_per_node=8)
    single = RunMesh(1, 1, 1, (shape.num_layers,))
    step = StepWork(*trained_parts(rollouts), mesh_costs(shape, single, cluster), row["mode"])
    mesh = make_mesh(
        shape,
        settings["processes"],
        MeshSizes(
            tensor=settings["tensor_model_parallel_size"],
            pipeline=settings["pipeline_model_parallel_size"],
            sequence_parallel=settings["sequence_parallel"],
        ),
    )
    grads = "bf16" if settings.get("bf16_gradients") else "fp32"
    states = StateSettings(optimizer=False, distributed_optimizer=False, main_grads=grads)
    kept, memory, segment = (settings.get(f"tree_{name}_tokens") for name in ("activation", "memory", "segment"))
    if row["mode"] == "packed":
        segment = memory = settings["pack_tokens"]
    prediction = Planner(shape, cluster, step, states).simulate(Choice(mesh, segment, memory, kept))
    # What PyTorch allocated; the context and the libraries' buffers are no part of it.
    assert (prediction.memory.total - FIXED_BYTES) / GIB == pytest.approx(row["peak_memory_gib"], rel=0.05)
    assert prediction.time.total == pytest.approx(row["seconds"], rel=0.15)


def steps_with_experts() -> list[Any]:
    """Steps with grouped experts whose tokens travel once to each rank: on one GPU, to which the rate of grouped
    products was fitted, and on two, to which nothing was.
    """
    steps = []
    for name in ("moe_h200", "moe_2xh200"):
        for run in json.loads((REPOSITORY / "benchmarks" / "results" / f"{name}.json").read_text())["runs"]:
            settings = run.get("settings", {})
            if settings.get("moe_grouped_gemm"):
                rows = [row | {"date": run["date"]} for row in run["rows"]]
                steps += [pytest.param(settings, row, id=f"{name}-{row['mode']}") for row in rows]
    return steps


@pytest.mark.parametrize(("settings", "row"), steps_with_experts())
def test_prediction_with_experts(settings: dict[str, Any], row: dict[str, Any]) -> None:
    rollouts = load_rollouts(rollout_file(f"{FILE}.npz"), max_sequences=settings["max_sequences"])
    layers = settings["num_layers"]
    shape = replace(SHAPES[settings["model"]], num_layers=layers, moe_layers=())
    cluster = Cluster(settings["processes"], gpus_per_node=8)
    step = StepWork(*trained_parts(rollouts), mesh_costs(shape, RunMesh(1, 1, 1, (layers,)), cluster), row["mode"])
    ranks = settings.get("expert_model_parallel_size", 1)
    mesh = make_mesh(shape, settings["processes"], MeshSizes(experts=ranks))
    states = StateSettings(optimizer=False, distributed_optimizer=False)
    choice = Choice(mesh, settings["tree_segment_tokens"], settings["tree_memory_tokens"])
    prediction = Planner(shape, cluster, step, states).simulate(choice)
    allocated = (prediction.memory.total - FIXED_BYTES) / GIB
    # The first steps were measured when layers with experts still kept their normed tokens, which were copied for the
    # experts on one GPU. On two, the first rank was measured, which has 0.9 GiB less in flight than the other one.
    if row["date"] > "2026-11-20":
        assert allocated == pytest.approx(row["peak_memory_gib"], rel=0.05)
    profile = row.get("profile", {"span_ms": 1, "idle_ms": 0})
    # A GPU that is idle for a third of a profiled step waits for its host, of whose speed the planner knows nothing.
    if profile["idle_ms"] < 0.3 * profile["span_ms"]:
        assert prediction.time.total == pytest.approx(row["seconds"], rel=0.1)
    assert (prediction.time.experts > 0) == (ranks > 1)
