"""LoRA on meshes against the stock model with adapted weights on one process: float64, parts of A and B joined."""

import pytest
import torch

from conftest import seed_all
from lora_cases import is_adapter, lora_config, lora_weights
from megatron_dta.extras.parity import random_training_samples
from mesh_cases import FULL_RECOMPUTE, MeshSuite, sizes
from mesh_worker import RankResult
from tree_engine_cases import QWEN2, QWEN3, branching_sequences, weights_of
from weight_shards import join_shards

OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 100}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
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
MESHES = {
    "tp2": (2, sizes(tp=2), [0]),
    "tp2-sp": (2, sizes(**SP), [0]),
    "cp2": (2, sizes(cp=2), [0]),
    "pp2": (2, sizes(pp=2), [0]),
    "pp2-alone": (2, sizes(pp=2, vpp=2, layout="E|tt|tt|L"), [0]),
    "dp2-idle-overlap": (2, sizes(**OVERLAP), [99, 0]),
    "ep2": (2, sizes(ep=2), [4, 0]),
    "ep2-overlap": (2, sizes(ep=2, **OVERLAP), [9, 0]),
    "ep2-over-tp2": (2, sizes(ep=2, etp=1, **SP), [0]),
    "etp1-tp2": (2, sizes(etp=1, **SP), [0]),
    "etp2": (2, sizes(ep=1, **SP), [0]),
    "tp2-dp2-overlap": (4, sizes(tp=2, **OVERLAP), [5, 0]),
}
COMBINATIONS = [
    *(("tp2-sp", "qwen3", "dta-mixed"), ("tp2", "gpt", "dta"), ("tp2-sp", "qwen2", "dta")),
    *(("pp2", "qwen2", "dta-mixed"), ("pp2-alone", "qwen2", "packed-recomputed")),
    ("dp2-idle-overlap", "qwen3", "dta"),
    *(("ep2", "experts", "packed"), ("cp2", "experts", "dta"), ("ep2-overlap", "experts", "dta")),
    *(("ep2-over-tp2", "experts", "dta"), ("etp2", "attention", "dta"), ("etp1-tp2", "experts", "dta")),
    ("tp2-dp2-overlap", "recompute", "dta-recomputed"),
]
SEED = 19


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    samples = random_training_samples(branching_sequences(seed_all(SEED), count=6, longest=8), seed=SEED)
    models = {name: lora_config(**settings) for name, settings in MODELS.items()}
    return MeshSuite(models, MESHES, {"": samples}, make_weights=lora_weights)


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    lost = {"tp2-sp lost": suite.case("tp2-sp", "qwen3", "packed", sabotage="reduction")}
    return suite.run(COMBINATIONS, tmp_path_factory.mktemp("lora"), lost)


@pytest.mark.parametrize(("mesh", "name", "cut"), COMBINATIONS)
def test_equals_one_process(suite, results, mesh, name, cut):
    ranks = results[f"{mesh} {name} {cut}"]
    expected = suite.check(ranks, mesh, name)
    norm = float(torch.stack([gradient.square().sum() for gradient in expected.gradients.values()]).sum().sqrt())
    assert ranks[0].grad_norm == pytest.approx(norm, rel=1e-6)  # Megatron measures it in float32


def test_lost_communication_would_be_seen(suite, results):
    assert suite.sees_fault(results["tp2-sp lost"], "tp2-sp", "qwen3")


@pytest.mark.parametrize("mesh", ["tp2 gpt dta", "tp2-sp qwen2 dta", "pp2 qwen2 dta-mixed", "ep2 experts packed"])
def test_first_adapters_are_the_same_on_every_mesh(suite, results, mesh):
    model = suite.models[mesh.split()[1]]
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank in results[mesh]:
        for name, values in rank.initial.items():
            if is_adapter(name):
                parts.setdefault(name, {})[rank.tensor_rank] = values
    expected = {name: values for name, values in weights_of(model, seed=5).items() if is_adapter(name)}
    assert parts.keys() == expected.keys()
    for name, values in expected.items():
        unsharded = join_shards([{name: parts[name][rank]} for rank in sorted(parts[name])], model)
        assert torch.equal(unsharded[name], values), name
