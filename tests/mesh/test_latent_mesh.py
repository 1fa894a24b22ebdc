"""Latent attention divided among processes: float64, against one process that trains each sequence alone."""

import pytest

from conftest import seed_all
from latent_cases import ADAPTERS, MODELS, latent_weights
from megatron_dta.extras.parity import random_training_samples
from mesh_cases import FULL_RECOMPUTE, MeshSuite, sizes
from mesh_worker import RankResult
from tree_engine_cases import branching_sequences, model_config, tree_config

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CUTS = {"dense": ("dense", 9, None), "dta": ("dta", 6, None), "dta-mixed": ("dta", 7, 12), "packed": ("packed", 45, 0)}
MESHES = {
    "tp2": (2, sizes(tp=2), [0]),
    "tp2-sp": (2, sizes(**SP), [0]),
    "dp2-idle-overlap": (2, sizes(overlap_grad_reduce=True, ddp_bucket_size=900), [0, 0]),
    "pp2": (2, sizes(pp=2, layout="Et|tL"), [0]),
    "pp2-vp2": (2, sizes(pp=2, vpp=2), [0]),
    "ep2": (2, sizes(ep=2), [4, 0]),
    "tp2-ep2": (2, sizes(ep=2, etp=1, **SP), [0]),
}
COMBINATIONS = [
    *(("tp2", "moonlight", "dta-mixed"), ("tp2", "deepseek", "packed")),
    *(("tp2-sp", "moonlight", "dta"), ("tp2-sp", "recompute", "dta-mixed")),
    *(("dp2-idle-overlap", "moonlight", "dta"), ("pp2-vp2", "four-layers", "dta-mixed")),
    *(("ep2", "experts", "dta-mixed"), ("tp2-ep2", "experts", "dta-mixed")),
    *(("tp2", "adapters", "dta-mixed"), ("tp2-sp", "adapters", "packed"), ("tp2-ep2", "expert-adapters", "dta")),
    ("pp2-vp2", "recomputed-adapters", "dta-mixed"),
]

WITH_FAULTS = ["deepseek", "adapters"]
# Planned within MiB: what is kept and recomputed follows from the counted bytes. Segments of 6 tokens.
MEMORY = {"pp2 limited": ("pp2", "experts", 0.14), "pp2 ample": ("pp2", "experts", 64.0)}


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    samples = random_training_samples(branching_sequences(seed_all(17), count=6, longest=8), seed=17)
    settings = MODELS | {
        "recompute": MODELS["deepseek"] | FULL_RECOMPUTE,
        "four-layers": MODELS["deepseek"] | {"num_layers": 4},
        "adapters": MODELS["deepseek"] | ADAPTERS,
        "expert-adapters": MODELS["experts"] | ADAPTERS,
        "recomputed-adapters": MODELS["moonlight"] | ADAPTERS | FULL_RECOMPUTE | {"num_layers": 4},
    }
    models = {name: model_config(vocab_size=8, **more) for name, more in settings.items()}
    return MeshSuite(models, MESHES, {"": samples}, CUTS, latent_weights)


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    more = {f"tp2 {model} lost": suite.case("tp2", model, "packed", sabotage="hidden") for model in WITH_FAULTS}
    for name, (mesh, model, mib) in MEMORY.items():
        more[name] = suite.case(mesh, model, "dta", tree=tree_config("dta", 6, tree_memory_gib=mib / 1024))
    return suite.run(COMBINATIONS, tmp_path_factory.mktemp("latent"), more)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
def test_equals_one_process(suite, results, combination):
    suite.check(results[" ".join(combination)], *combination[:2])


@pytest.mark.parametrize("name", MEMORY)
def test_steps_within_a_limit_of_memory(suite, results, name):
    """Each model chunk's pool holds to the byte what was counted for it."""
    suite.check(results[name], *MEMORY[name][:2])
    assert all(counted == held for rank in results[name] for counted, held in rank.pools)
    assert any(rank.recomputed_tokens for rank in results[name]) == ("limited" in name)


@pytest.mark.parametrize("model", WITH_FAULTS)
def test_a_missing_sum_would_be_seen(suite, results, model):
    assert suite.sees_fault(results[f"tp2 {model} lost"], "tp2", model)
