"""Experts on two GPUs, with NCCL, the kernels and passes in turns: float32, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from megatron_dta.config import ParallelConfig
from megatron_dta.parity import compare_outcomes, random_training_samples
from megatron_dta.parity.outcome import Outcome
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
MESHES = {
    "ep2": (2, EP, PARTITION),
    "ep2-turns": (2, replace(EP, overlap_moe_expert_parallel_comm=True), PARTITION),
}
CUTS = {"dta": ("dta", 16, None), "recomputed": ("dta", 16, 0)}


def on_host(ranks: list[RankResult]) -> list[RankResult]:
    return [
        replace(rank, gradients={name: gradient.cpu() for name, gradient in rank.gradients.items()}) for rank in ranks
    ]


def test_two_gpus_agree_with_one(tmp_path):
    """Repeated steps give the same bits, and so do steps in turns and the same ops one after the other."""
    samples = {"": random_training_samples(branching_sequences(seed_all(17), count=14, longest=90), seed=17)}
    models = {name: model_config(**settings) for name, settings in MODELS.items()}
    suite = MeshSuite(models, MESHES, samples, CUTS, moe_weights)
    cases = {}
    for model in models:
        for cut in CUTS:
            cases[f"{model}, {cut}"] = suite.case("ep2", model, cut)
            cases[f"{model}, {cut}, again"] = suite.case("ep2", model, cut)
            cases[f"{model}, {cut}, turns"] = suite.case("ep2-turns", model, cut)
            cases[f"{model}, {cut}, turns alone"] = suite.case("ep2-turns", model, cut, sabotage="turns")
    results = run_on_ranks(run_cases, cases, 2, tmp_path / "ranks", "nccl", LONGEST_S)
    found = {name: on_host([rank[name] for rank in results]) for name in cases}
    for model in models:
        expected = suite.outcome(model)
        expected = Outcome(
            expected.loss, expected.logprobs, {name: each.cpu() for name, each in expected.gradients.items()}
        )
        for cut in CUTS:
            name = f"{model}, {cut}"
            for kind in ("", ", turns"):
                errors = compare_outcomes(joined(found[name + kind], models[model], PARTITION), expected)
                print(f"{name}{kind}: largest error {errors.largest():.1e}, {found[name + kind][0].num_pairs} pairs")
                assert errors.largest() < 5e-5
            for one, other in ((name, f"{name}, again"), (f"{name}, turns", f"{name}, turns alone")):
                for rank, twin in zip(found[one], found[other], strict=True):
                    assert rank.loss == twin.loss
                    assert all(torch.equal(each, twin.gradients[key]) for key, each in rank.gradients.items())
            assert found[f"{name}, turns"][0].num_pairs > 0
