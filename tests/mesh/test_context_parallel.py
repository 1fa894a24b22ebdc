"""Context parallelism against one process that trains each sequence alone: float64, every mode and mesh."""

import os
from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from direct_layer_cases import check_both_ways, plain_weights
from fused_layers_cases import fused
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.checks.mesh import check_context_parallel, check_world_size
from megatron_dta.extras.parity import random_training_samples
from mesh_cases import FULL_RECOMPUTE, MeshSuite, sizes
from mesh_worker import RankResult
from moe_cases import DEEPSEEK_BALANCED, QWEN3_BALANCED, moe_weights
from tree_engine_cases import QWEN2, QWEN3, branching_sequences, check_siblings, model_config, siblings, tree_config

SEED = 23
needs_kernels = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
FOUR_HEADS = {"num_attention_heads": 8, "num_query_groups": 4, "hidden_size": 32}


MESHES = {
    "cp2": (2, sizes(cp=2), [0]),
    "cp2-autograd": (2, sizes(cp=2, no_gradient_accumulation_fusion=True), [0]),
    "cp4": (4, sizes(cp=4), [0]),
    "cp2-pp2": (4, sizes(cp=2, pp=2), [0]),
    "cp2-dp2-idle-overlap": (4, sizes(cp=2, overlap_grad_reduce=True, ddp_bucket_size=900), [99, 0]),
    "cp2-ep2": (2, sizes(cp=2, ep=2), [0]),
    "cp2-dp2-ep4": (4, sizes(cp=2, ep=4), [5, 0]),
    "cp2-tp2-ep2": (4, sizes(cp=2, tp=2, sp=True, ep=2, etp=1), [0]),
}
COMBINATIONS = [
    ("cp2", "qwen3", "dense"),
    ("cp2-autograd", "qwen2", "dta-mixed"),
    ("cp2", "recompute", "dta-mixed"),
    ("cp4", "qwen3", "dta-mixed"),
    ("cp2-dp2-idle-overlap", "qwen3", "dta"),
    *(("cp2-ep2", "deepseek", "dta-mixed"), ("cp2-dp2-ep4", "deepseek", "packed")),
    ("cp2-tp2-ep2", "wide-experts", "packed"),
]
MODELS = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "recompute": QWEN3 | FULL_RECOMPUTE,
    "deepseek": DEEPSEEK_BALANCED,
    "wide-experts": QWEN3_BALANCED | FOUR_HEADS,
}


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    samples = random_training_samples(branching_sequences(seed_all(SEED), count=6, longest=8), seed=SEED)
    models = {name: model_config(vocab_size=8, **settings) for name, settings in MODELS.items()}
    return MeshSuite(models, MESHES, {"": samples}, make_weights=moe_weights)


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    more = {}
    for changed in (False, True):
        samples = siblings(changed)
        for tokens in (13, 200):
            tree, name = tree_config("dta", tokens), f"cp2 siblings {tokens} {changed}"
            more[name] = suite.case("cp2", "qwen3", "dta", samples=samples, partition=[[0, 1, 2]], tree=tree)
    tree = replace(tree_config("dta", 9, 12), kv_offload_fraction=1.0)
    more["cp2-pp2 offloaded"] = suite.case("cp2-pp2", "qwen3", "dta", tree=tree)
    for fault in ("reduction", "logprobs", "attention gradients"):
        more[f"cp2 without {fault}"] = suite.case("cp2", "qwen3", "packed", sabotage=fault)
    return suite.run(COMBINATIONS, tmp_path_factory.mktemp("context"), more)


@pytest.mark.parametrize(("mesh", "name", "cut"), COMBINATIONS)
def test_equals_one_process(suite, results, mesh, name, cut):
    suite.check(results[f"{mesh} {name} {cut}"], mesh, name)


def test_stages_with_keys_on_the_host(suite, results):
    suite.check(results["cp2-pp2 offloaded"], "cp2-pp2", "qwen3")


@pytest.mark.parametrize("segment_tokens", [13, 200])
def test_a_sibling_changes_no_bit(results, segment_tokens):
    before, after = (results[f"cp2 siblings {segment_tokens} {changed}"] for changed in (False, True))
    for rank in range(2):
        check_siblings(before[rank].logprobs, after[rank].logprobs)


@pytest.mark.parametrize("fault", ["reduction", "logprobs", "attention gradients"])
def test_lost_communication_would_be_seen(suite, results, fault):
    """The control of the tests above."""
    assert suite.sees_fault(results[f"cp2 without {fault}"], "cp2", "qwen3")


def test_biases_of_experts_move_by_the_loads_of_all_tokens(suite, results):
    ranks = [results[name] for name in ("cp2-ep2 deepseek dta-mixed", "cp2-dp2-ep4 deepseek packed")]
    for name, bias in ranks[0][0].expert_biases.items():
        assert not torch.equal(bias, suite.weights["deepseek"][name])
        assert all(torch.equal(rank.expert_biases[name], bias) for replica in ranks for rank in replica)


def test_sizes_that_do_not_divide_are_refused():
    model = model_config(**QWEN3)
    for context, tensor in ((3, 1), (8, 1), (4, 2)):
        words = f"--context-parallel-size {context} x --tensor-model-parallel-size {tensor} does not divide the heads"
        with pytest.raises(InputError, match=words):
            check_context_parallel(model, sizes(cp=context, tp=tensor, sp=tensor > 1))
    with pytest.raises(
        InputError, match="--context-parallel-size 2 does not divide the 3 processes; start a multiple of 2"
    ):
        check_world_size(sizes(cp=2), 3)


@needs_kernels
def test_layers_as_one_function_exchange_too(tmp_path):
    model = fused(**QWEN3, num_query_groups=1, num_layers=1)
    samples = random_training_samples(branching_sequences(seed_all(51), count=6, longest=8), seed=51)
    suite = MeshSuite({"fused": model}, MESHES, {"": samples}, {"": ("dta", 13, 20)}, plain_weights)
    check_both_ways(suite, "cp2", "fused", tmp_path)
