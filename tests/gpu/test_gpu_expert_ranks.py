"""Experts on two GPUs, with NCCL and the kernels: float32, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from megatron_dta.core.config import ParallelConfig
from megatron_dta.extras.parity import compare_outcomes, random_training_samples
from megatron_dta.extras.parity.outcome import Outcome
from mesh_cases import MeshSuite, joined
from mesh_worker import RankResult, run_cases, run_on_ranks
from moe_cases import DEEPSEEK, QWEN3_MOE, moe_weights
from tree_engine_cases import branching_sequences, model_config

pytestmark = pytest.mark.two_gpus

LONGEST_S = 280
WIDE = {"hidden_size": 128, "kv_channels": 64, "moe_grouped_gemm": True, "params_dtype": torch.float32}
MODELS = {"qwen3": QWEN3_MOE | WIDE, "shared expert": DEEPSEEK | WIDE}
EP = ParallelConfig(expert_model_parallel_size=2)
PARTITION = [[4, 5, 7, 9, 10, 12, 13, 15], [0, 1, 2, 3, 6, 8, 11, 14, 16]]
MESHES = {"ep2": (2, EP, PARTITION)}
CUTS = {"dta": ("dta", 16, None), "recomputed": ("dta", 16, 0)}


def on_host(ranks: list[RankResult]) -> list[RankResult]:
    return [
        replace(rank, gradients={name: gradient.cpu() for name, gradient in rank.gradients.items()}) for rank in ranks
    ]


def test_two_gpus_agree_with_one(tmp_path):
    """Repeated steps give the same bits."""
    samples = {"": random_training_samples(branching_sequences(seed_all(17), count=14, longest=90), seed=17)}
    models = {name: model_config(**settings) for name, settings in MODELS.items()}
    suite = MeshSuite(models, MESHES, samples, CUTS, moe_weights)
    cases = {}
    for model in models:
        for cut in CUTS:
            cases[f"{model}, {cut}"] = suite.case("ep2", model, cut)
            cases[f"{model}, {cut}, again"] = suite.case("ep2", model, cut)
    results = run_on_ranks(run_cases, cases, 2, tmp_path / "ranks", "nccl", LONGEST_S)
    steps = {name: on_host([rank[name] for rank in results]) for name in cases}
    for model in models:
        alone = suite.outcome(model)
        gradients = {name: gradient.cpu() for name, gradient in alone.gradients.items()}
        expected = Outcome(alone.loss, alone.logprobs, gradients)
        for cut in CUTS:
            name = f"{model}, {cut}"
            errors = compare_outcomes(joined(steps[name], models[model], PARTITION), expected)
            print(f"{name}: largest error {errors.largest():.1e}")
            assert errors.largest() < 5e-5
            for rank, again in zip(steps[name], steps[f"{name}, again"], strict=True):
                assert rank.loss == again.loss
                assert all(torch.equal(gradient, again.gradients[key]) for key, gradient in rank.gradients.items())
