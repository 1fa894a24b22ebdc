"""Context ranks and expert ranks on two GPUs, with NCCL and the kernels: float32 against one process, repeatable."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from megatron_dta.core.config import ParallelConfig
from megatron_dta.extras.parity import compare_outcomes, random_training_samples
from mesh_cases import MeshSuite, joined
from mesh_worker import RankResult, run_cases, run_on_ranks
from moe_cases import DEEPSEEK, QWEN3_MOE, moe_weights
from tree_engine_cases import QWEN2, QWEN3, branching_sequences, model_config

pytestmark = pytest.mark.two_gpus

LONGEST_S = 280
WIDE = {"hidden_size": 256, "kv_channels": 64, "params_dtype": torch.float32}
EXPERTS = {"hidden_size": 128, "kv_channels": 64, "params_dtype": torch.float32}
PARTITION = [[4, 5, 7, 9, 10, 12, 13, 15], [0, 1, 2, 3, 6, 8, 11, 14, 16]]
MESHES = {
    "cp2": (2, ParallelConfig(context_parallel_size=2), [0]),
    "ep2": (2, ParallelConfig(expert_model_parallel_size=2), PARTITION),
}
MODELS = {
    "cp2": {"function": QWEN3 | WIDE, "biases": QWEN2 | WIDE},
    "ep2": {"qwen3": QWEN3_MOE | EXPERTS, "shared expert": DEEPSEEK | EXPERTS},
}
CUTS = {
    "cp2": {"dta": ("dta", 35, None), "recomputed": ("dta", 16, 0), "packed": ("packed", 200, None)},
    "ep2": {"dta": ("dta", 16, None), "recomputed": ("dta", 16, 0)},
}
TOLERANCE = {"cp2": 1e-3, "ep2": 5e-5}


def on_host(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: gradient.cpu() for name, gradient in gradients.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_two_gpus_agree_with_one(mesh: str, tmp_path: Path) -> None:
    """Repeated steps give the same bits."""
    samples = {"": random_training_samples(branching_sequences(seed_all(17), count=14, longest=90), seed=17)}
    models = {name: model_config(**settings) for name, settings in MODELS[mesh].items()}
    suite = MeshSuite(models, MESHES, samples, CUTS[mesh], moe_weights)
    names = [(model, cut) for model in models for cut in CUTS[mesh]]
    cases = {f"{model}, {cut}, {turn}": suite.case(mesh, model, cut) for model, cut in names for turn in (0, 1)}
    results = run_on_ranks(run_cases, cases, 2, tmp_path / "ranks", "nccl", LONGEST_S)

    def ranks_of(name: str) -> list[RankResult]:
        return [replace(rank[name], gradients=on_host(rank[name].gradients)) for rank in results]

    for model, cut in names:
        expected = suite.outcome(model)
        expected = replace(expected, gradients=on_host(expected.gradients))
        first, again = (ranks_of(f"{model}, {cut}, {turn}") for turn in (0, 1))
        errors = compare_outcomes(joined(first, models[model], suite.partition(mesh)), expected)
        print(f"{model}, {cut}: {errors}")
        assert errors.largest() < TOLERANCE[mesh]
        for one, other in zip(first, again, strict=True):
            assert one.loss == other.loss
            assert all(torch.equal(other.gradients[name], gradient) for name, gradient in one.gradients.items())
