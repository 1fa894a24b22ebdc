"""Context ranks on two GPUs, with NCCL and the kernels: float32 against one process, repeatable bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from megatron_dta.core.config import ParallelConfig
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock
from mesh_cases import MeshSuite, joined
from mesh_worker import RankResult, run_cases, run_on_ranks
from tree_engine_cases import QWEN2, QWEN3, TEMPERATURE, branching_sequences, model_config

pytestmark = pytest.mark.two_gpus

LONGEST_S = 280
WIDE = {"hidden_size": 256, "kv_channels": 64, "params_dtype": torch.float32}
MESHES = {"cp2": (2, ParallelConfig(context_parallel_size=2), [0])}
CUTS = {"dta": ("dta", 35, None), "recomputed": ("dta", 16, 0), "packed": ("packed", 200, None)}


def on_host(ranks: list[RankResult]) -> list[RankResult]:
    return [
        replace(rank, gradients={name: gradient.cpu() for name, gradient in rank.gradients.items()}) for rank in ranks
    ]


def test_two_gpus_agree_with_one(tmp_path):
    samples = {"": random_training_samples(branching_sequences(seed_all(17), count=14, longest=90), seed=17)}
    models = {"function": model_config(**QWEN3, **WIDE), "biases": model_config(**QWEN2, **WIDE)}
    suite = MeshSuite(models, MESHES, samples, CUTS)
    names = [(model, cut) for model in models for cut in CUTS]
    cases = {f"{model}, {cut}, {turn}": suite.case("cp2", model, cut) for model, cut in names for turn in (0, 1)}
    results = run_on_ranks(run_cases, cases, 2, tmp_path, "nccl", LONGEST_S)
    for model, cut in names:
        expected = run_stock(models[model], suite.weights[model], samples[""], suite.objective, TEMPERATURE)
        runs = [on_host([rank[f"{model}, {cut}, {turn}"] for rank in results]) for turn in (0, 1)]
        found = joined(runs[0], models[model], suite.partition("cp2"))
        expected = replace(expected, gradients={name: g.cpu() for name, g in expected.gradients.items()})
        errors = compare_outcomes(found, expected)
        print(f"{model}, {cut}: {errors}")
        assert errors.largest() < 1e-3
        for one, other in zip(*runs, strict=True):
            assert all(torch.equal(other.gradients[name], gradient) for name, gradient in one.gradients.items())
