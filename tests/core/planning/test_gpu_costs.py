"""Costs from data sheets, and their correction by the ops of a step."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.costs.correction import CostCorrection, MeasuredPass, fit_correction
from megatron_dta.core.planning.costs.gpus import LayerSplit, gpu_cost_model, gpu_named
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.timeline import TimelineEvent
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.families.named_shapes import SHAPES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
H200, _ = gpu_named("NVIDIA H200")
SHAPE = SHAPES["qwen3-1.7b"]


def test_costs_are_those_measured_on_an_h200() -> None:
    values = json.loads((RESULTS / "segment_seconds_qwen3-1.7b_h200.json").read_text())
    passes = values["forward"], values["backward"]
    seconds = [
        [SHAPE.num_layers * costs.get(f"{name}_and_layer", 0.0) + costs.get(name, 0.0) for costs in passes]
        for name in ("token", "pair", "edge", "floor")
    ]
    measured = CostModel.of_passes(*seconds, segment_tokens=2048)
    predicted = gpu_cost_model(SHAPE, H200, LayerSplit(), measured.segment_tokens)
    for field in fields(CostModel):
        assert getattr(predicted, field.name) == pytest.approx(getattr(measured, field.name), rel=0.01), field.name


@pytest.mark.parametrize(
    ("reported", "name", "known"),
    [
        ("NVIDIA H200", "H200", True),
        ("NVIDIA GH200 480GB", "GH200", True),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "H100 PCIe", True),
        ("NVIDIA GB200", "GB200", True),
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("Some other device", "H100", False),
    ],
)
def test_a_gpu_is_found_by_the_name_that_cuda_reports(reported: str, name: str, known: bool) -> None:
    gpu, is_known = gpu_named(reported)
    assert (gpu.name, is_known) == (name, known)


def test_tensor_parallelism_divides_work_but_not_launches_or_sums() -> None:
    undivided, half = (gpu_cost_model(SHAPE, H200, LayerSplit(tensor_size=n, direct=False), 2048) for n in (1, 2))
    assert half.seconds_per_pair == undivided.seconds_per_pair / 2
    assert half.seconds_per_edge == undivided.seconds_per_edge / 2
    assert undivided.seconds_per_token / 2 < half.seconds_per_token < undivided.seconds_per_token
    assert half.floor_seconds == undivided.floor_seconds
    parallel = gpu_cost_model(SHAPE, H200, LayerSplit(tensor_size=2, sequence_parallel=True, direct=False), 2048)
    assert parallel.seconds_per_token < half.seconds_per_token
    assert gpu_cost_model(SHAPE, H200, LayerSplit(), 2048).floor_seconds < undivided.floor_seconds
    single = gpu_cost_model(SHAPE, H200, LayerSplit(is_16_bit=False), 2048)
    assert single.seconds_per_pair == pytest.approx(undivided.seconds_per_pair * H200.flops_16 / H200.flops_32)


def measured_pass(rng: np.random.Generator, model: CostModel, stages: int, chunks: int, noise: float) -> MeasuredPass:
    """A pass whose ops took what ``model`` says, give or take ``noise``; recomputed backwards included."""
    num = 24
    tokens = rng.choice([0, 40, 90, 3000, 8000], num)
    tokens[:8] = [40, 40, 40, 90, 3000, 8000, 8000, 3000]
    counts = tokens, tokens * rng.integers(100, 9000, num), tokens // 2
    layers = [int(n) for n in rng.integers(3, 6, stages * chunks)]
    kept = rng.random((stages * chunks, num)) < 0.7
    kept[:, :8] = True
    costs = PipelineCosts.of_segments(model, *counts, layers, ~kept)
    events = []
    for stage in range(stages * chunks):
        for segment in range(num):
            for kind, seconds in (("F", costs.forward), ("B", costs.backward)):
                took = seconds[stage, segment] * (1 + noise * rng.standard_normal())
                events.append(TimelineEvent(stage % stages, kind, segment, stage // stages, 1.0, 1.0 + took))
    events.append(TimelineEvent(0, "wait", 3, 0, 0.0, 50.0))
    return MeasuredPass(counts, layers, stages, kept, events)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (3, 1), (2, 2)])
def test_a_known_correction_comes_back(stages: int, chunks: int) -> None:
    rng = seed_all(7)
    model = gpu_cost_model(SHAPE, H200, LayerSplit(), 8192)
    truth = CostCorrection(*rng.uniform(0.6, 1.9, 4))
    exact = fit_correction(model, measured_pass(rng, truth.apply(model), stages, chunks, 0.0))
    for name, value in asdict(truth).items():
        assert getattr(exact, name) == pytest.approx(value, rel=1e-9), name
    noisy = measured_pass(rng, truth.apply(model), stages, chunks, 0.05)
    held_up = [replace(e, end=e.end + 9.0) if i % 37 == 5 else e for i, e in enumerate(noisy.events)]
    fitted = fit_correction(model, replace(noisy, events=held_up))
    for name, value in asdict(truth).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.1), name


def test_cost_model_of_a_shape() -> None:
    shape = CostModel.from_shape(DecoderShape(28, 2048, 6144, 16, 8, 128, 151936))
    for name, value in vars(CostModel()).items():
        assert getattr(shape, name) == pytest.approx(value, rel=1e-4), name
    assert CostModel(2.0, 3.0, 5.0, 7.0, 4).cost(8, 10, 1) == 2 * 8 + 3 * 10 + 5
    assert CostModel(2.0, 3.0, 5.0, 12.0, 4).cost(8, 10, 1) == 12 * 2 + 3 * 10 + 5
    seconds = CostModel(3.0, 0.0, 6.0, 32.0, 4).segment_seconds(np.array([4, 7, 9, 30]), 0, np.array([0, 0, 1, 0]))
    np.testing.assert_allclose(seconds, [[10.0, 10.0, 11.0, 30.0], [22.0, 22.0, 22.0, 60.0]])
