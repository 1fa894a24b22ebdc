"""Hybrid models divided among processes: float64, against one process that trains each sequence alone."""

from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from hybrid_cases import EXPERTS, HYBRID, NEMOTRON, NEMOTRON_EXPERTS, SIZES, spread
from lora_cases import LORA, lora_weights
from megatron_dta.core.config import ModelConfig
from megatron_dta.extras.parity import random_training_samples
from mesh_cases import FULL_RECOMPUTE, MeshSuite, sizes
from mesh_worker import RankResult
from tree_engine_cases import branching_sequences, check_siblings, model_config, siblings, tree_config, weights_of

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TWO_LAYERS = HYBRID | {"num_layers": 2, "mixer_layer_freq": "[1,0]"}
MODELS = {
    "hybrid": HYBRID,
    "adapters": TWO_LAYERS | LORA | FULL_RECOMPUTE,
    "experts": TWO_LAYERS | EXPERTS | {"moe_aux_loss_coeff": 0.3},
    "four-heads": TWO_LAYERS | {"mixer": replace(SIZES, linear_num_key_heads=4)},
    "mamba": NEMOTRON | {"num_layers": 4, "hybrid_layer_pattern": "M*-M"},
    "mamba-adapters": NEMOTRON | LORA | {"num_layers": 4, "hybrid_layer_pattern": "M*-M"},
    "mamba-experts": NEMOTRON_EXPERTS,
    # The first stage has no attention, the last one no gated delta net.
    "uneven": HYBRID | {"num_layers": 4, "mixer_layer_freq": "[1,1,1,0]"},
}
CUTS = {"dense": ("dense", 9, None), "dta": ("dta", 6, None), "dta-mixed": ("dta", 7, 12), "packed": ("packed", 45, 0)}
# Segments shorter than the context ranks.
SHORT = {"short": ("dta", 3, None)}
MESHES = {
    "tp2": (2, sizes(tp=2), [0]),
    "tp2-sp": (2, sizes(**SP), [0]),
    "dp2-idle-overlap": (2, sizes(overlap_grad_reduce=True, ddp_bucket_size=900), [0, 0]),
    "pp2": (2, sizes(pp=2, layout="Et*3|tL"), [0]),
    "pp2-vp2": (2, sizes(pp=2, vpp=2), [0]),
    "ep2": (2, sizes(ep=2), [4, 0]),
    "ep2-idle": (2, sizes(ep=2), [0, 0]),
    "cp2": (2, sizes(cp=2), [0]),
    "cp2-tp2": (4, sizes(cp=2, **SP), [0]),
    "cp2-ep2": (2, sizes(cp=2, ep=2), [0]),
    "cp4": (4, sizes(cp=4), [0]),
    "tp2-ep2": (2, sizes(ep=2, etp=1, **SP), [0]),
}
# Planned within MiB: what is kept, recomputed and in flight follows from the counted bytes. Segments of 6 tokens.
MEMORY = {
    "pp2 limited": ("pp2", "uneven", 0.33),
    "pp2-vp2 limited": ("pp2-vp2", "uneven", 0.23),
    "ep2 limited": ("ep2", "experts", 0.15),
}
COMBINATIONS = [
    ("tp2-sp", "hybrid", "packed"),
    *(("tp2-sp", "adapters", "dta-mixed"), ("tp2-ep2", "experts", "dta-mixed")),
    ("dp2-idle-overlap", "hybrid", "dta"),
    *(("pp2", "uneven", "dense"), ("ep2-idle", "experts", "dta")),
    *(("cp2", "adapters", "packed"), ("cp2-ep2", "experts", "packed")),
    ("cp2-tp2", "four-heads", "dta-mixed"),
    *(
        ("tp2", "mamba", "dta-mixed"),
        ("tp2-sp", "mamba-adapters", "packed"),
        ("pp2-vp2", "mamba", "dta"),
        ("cp2", "mamba", "dta"),
    ),
    *(("cp4", "mamba", "short", "few"), ("tp2-ep2", "mamba-experts", "dta-mixed")),
]


def slow_weights(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    return spread((weights_of if model.lora_rank is None else lora_weights)(model, seed), seed)


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    samples = random_training_samples(branching_sequences(seed_all(17), count=6, longest=8), seed=17)
    models = {name: model_config(vocab_size=8, **settings) for name, settings in MODELS.items()}
    return MeshSuite(models, MESHES, {"": samples, "few": samples[:4]}, CUTS | SHORT, slow_weights)


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    more = {"tp2 hidden": suite.case("tp2", "hybrid", "packed", sabotage="hidden")}
    for changed in (False, True):
        samples, tree = siblings(changed), tree_config("dta", 13)
        more[f"cp2 siblings {changed}"] = suite.case(
            "cp2", "hybrid", "dta", samples=samples, partition=[[0, 1, 2]], tree=tree
        )
    for name, (mesh, model, mib) in MEMORY.items():
        more[name] = suite.case(mesh, model, "dta", tree=tree_config("dta", 6, tree_memory_gib=mib / 1024))
    return suite.run(COMBINATIONS, tmp_path_factory.mktemp("hybrid"), more)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
def test_equals_one_process(suite, results, combination):
    mesh, model, _, *forest = combination
    suite.check(results[" ".join(combination)], mesh, model, *forest)


@pytest.mark.parametrize("name", MEMORY)
def test_steps_within_a_limit_of_memory(suite, results, name):
    """Same losses and gradients; each model chunk's pools hold to the byte what was counted for its own layers."""
    mesh, model, _ = MEMORY[name]
    suite.check(results[name], mesh, model)
    for rank in results[name]:
        print(name, rank.pools, rank.recomputed_tokens)
        assert all(counted == held for counted, held in rank.pools)
        assert rank.recomputed_tokens > 0


def test_a_sibling_changes_no_bit_on_context_ranks(results):
    before, after = (results[f"cp2 siblings {changed}"] for changed in (False, True))
    for rank in range(2):
        check_siblings(before[rank].logprobs, after[rank].logprobs)


def test_a_missing_sum_would_be_seen(suite, results):
    assert suite.sees_fault(results["tp2 hidden"], "tp2", "hybrid")
