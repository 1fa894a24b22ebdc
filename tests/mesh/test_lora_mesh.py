"""LoRA on meshes against the stock model with adapted weights on one process: float64, parts of A and B joined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from lora_cases import is_adapter, lora_config, lora_weights
from megatron_dta.config import ObjectiveConfig, ParallelConfig
from megatron_dta.objectives import make_objective
from megatron_dta.parity import compare_outcomes, random_training_samples, run_stock
from megatron_dta.parity.shards import join_shards
from mesh_cases import CUTS, GRPO, _partition
from mesh_worker import MeshCase, RankResult, run_cases, run_on_ranks
from moe_mesh_cases import joined
from tree_engine_cases import QWEN2, QWEN3, TEMPERATURE, branching_sequences, tree_config, weights_of

OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 100}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_layer_freq": "[0,1]", "moe_aux_loss_coeff": 0.1}
MODELS = {
    "qwen3": QWEN3,
    # Tied embeddings are frozen on the first and the last stage.
    "qwen2": QWEN2 | {"untie_embeddings_and_output_weights": False, "num_layers": 4},
    "gpt": {"disable_bias_linear": False, "normalization": "LayerNorm", "swiglu": False},
    "recompute": QWEN3 | FULL_RECOMPUTE,
    "experts": EXPERTS,
    "attention": EXPERTS | {"lora_target_modules": ["linear_qkv", "linear_proj"]},
}
# (processes, sizes, samples of each data-parallel rank; the last takes the rest)
MESHES = {
    "tp2": (2, {"tensor_model_parallel_size": 2}, [0]),
    "tp2-sp": (2, SP, [0]),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, [0]),
    "pp2-alone": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "pipeline_model_parallel_layout": "E|tt|tt|L",
        },
        [0],
    ),
    "dp2-overlap": (2, OVERLAP, [9, 0]),
    "dp2-idle-overlap": (2, OVERLAP, [12, 0]),
    "ep2": (2, {"expert_model_parallel_size": 2}, [4, 0]),
    "ep2-overlap": (2, {"expert_model_parallel_size": 2, **OVERLAP}, [9, 0]),
    "ep2-over-tp2": (2, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **SP}, [0]),
    "etp1-tp2": (2, {"expert_tensor_parallel_size": 1, **SP}, [0]),
    "etp2": (2, {"expert_model_parallel_size": 1, **SP}, [0]),
    "tp2-sp-pp2": (4, {"pipeline_model_parallel_size": 2, **SP}, [0]),
    "tp2-dp2-overlap": (4, {"tensor_model_parallel_size": 2, **OVERLAP}, [5, 0]),
}
COMBINATIONS = [
    *((mesh, "qwen3", cut) for mesh in ("tp2", "tp2-sp", "pp2", "dp2-overlap") for cut in CUTS),
    *((mesh, name, "dta") for mesh in ("tp2", "tp2-sp") for name in ("gpt", "recompute", "qwen2")),
    *((mesh, "qwen2", cut) for mesh in ("pp2", "pp2-alone") for cut in ("dta-mixed", "packed-recomputed")),
    ("pp2", "recompute", "dta"),
    ("dp2-idle-overlap", "qwen3", "dta"),
    *(("ep2", "experts", cut) for cut in ("dense", "dta-mixed")),
    ("ep2-overlap", "experts", "dta"),
    ("ep2-over-tp2", "experts", "dta"),
    ("etp2", "attention", "dta"),
    ("etp1-tp2", "experts", "dta"),
    ("tp2-sp-pp2", "qwen2", "dta-mixed"),
    ("tp2-dp2-overlap", "recompute", "dta-recomputed"),
]
SEED = 19


class _References:
    def __init__(self) -> None:
        self.samples = random_training_samples(branching_sequences(seed_all(SEED), count=12, longest=30), seed=SEED)
        objective = make_objective(ObjectiveConfig(**GRPO))
        self.models = {name: lora_config(**settings) for name, settings in MODELS.items()}
        self.weights = {name: lora_weights(model, seed=5) for name, model in self.models.items()}
        self.outcomes = {
            name: run_stock(model, self.weights[name], self.samples, objective, TEMPERATURE)
            for name, model in self.models.items()
        }

    def case(self, mesh: str, name: str, cut: str, **changes: object) -> MeshCase:
        _, sizes, partition = MESHES[mesh]
        found = MeshCase(
            self.models[name],
            ParallelConfig(**sizes),
            tree_config(*CUTS[cut]),
            self.samples,
            _partition(len(self.samples), partition),
            self.weights[name],
            GRPO,
            TEMPERATURE,
        )
        return replace(found, **changes)


@pytest.fixture(scope="module")
def references() -> _References:
    return _References()


@pytest.fixture(scope="module")
def results(references, tmp_path_factory) -> dict[str, list[RankResult]]:
    found = {}
    for world_size in (2, 4):
        cases = {
            " ".join(combination): references.case(*combination)
            for combination in COMBINATIONS
            if MESHES[combination[0]][0] == world_size
        }
        if world_size == 2:
            cases["lost"] = references.case("tp2-sp", "qwen3", "dta", sabotage="reduction")
        ranks = run_on_ranks(run_cases, cases, world_size, tmp_path_factory.mktemp("lora") / str(world_size))
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.mark.parametrize(("mesh", "name", "cut"), COMBINATIONS)
def test_equals_one_process(references, results, mesh, name, cut):
    _, _, partition = MESHES[mesh]
    ranks = results[f"{mesh} {name} {cut}"]
    outcome = joined(ranks, references.models[name], _partition(len(references.samples), partition))
    expected = references.outcomes[name]
    assert outcome.gradients.keys() == expected.gradients.keys()
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors
    norm = float(torch.stack([gradient.square().sum() for gradient in expected.gradients.values()]).sum().sqrt())
    assert ranks[0].grad_norm == pytest.approx(norm, rel=1e-6)  # Megatron measures it in float32


def test_lost_communication_would_be_seen(references, results):
    with pytest.raises((AssertionError, ValueError)):
        joined(results["lost"], references.models["qwen3"], [list(range(len(references.samples)))])


@pytest.mark.parametrize("mesh", ["tp2 qwen3 dta", "tp2-sp qwen2 dta", "pp2 qwen2 dta-mixed", "ep2 experts dense"])
def test_first_adapters_are_the_same_on_every_mesh(references, results, mesh):
    model = references.models[mesh.split()[1]]
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank in results[mesh]:
        for name, values in rank.initial.items():
            if is_adapter(name):
                parts.setdefault(name, {})[rank.tensor_rank] = values
    expected = {name: values for name, values in weights_of(model, seed=5).items() if is_adapter(name)}
    assert parts.keys() == expected.keys()
    for name, values in expected.items():
        whole = join_shards([{name: parts[name][rank]} for rank in sorted(parts[name])], model)
        assert torch.equal(whole[name], values), name
