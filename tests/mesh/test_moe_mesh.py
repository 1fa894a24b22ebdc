"""Experts divided among processes whose trees differ: float64, against one process that trains each sequence alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.extras.parity import random_training_samples
from mesh_cases import FULL_RECOMPUTE, MeshSuite, sizes
from mesh_worker import RankResult, copy_shards, run_on_ranks
from moe_cases import DEEPSEEK_BALANCED, QWEN3_BALANCED, QWEN3_MOE, moe_weights, updated_expert_biases
from tree_engine_cases import branching_sequences, model_config, siblings
from weight_shards import join_shards

EP = ParallelConfig(expert_model_parallel_size=2)
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 900}
MODELS = {
    "qwen3": QWEN3_MOE,
    "qwen3-balanced": QWEN3_BALANCED,
    "deepseek": DEEPSEEK_BALANCED,
    "recompute": QWEN3_BALANCED | FULL_RECOMPUTE,
    "all-experts": QWEN3_MOE | {"moe_router_topk": 6},
}
CUTS = {
    "dense": ("dense", 9, None),
    "packed": ("packed", 45, 0),
    "dta": ("dta", 6, None),
    "dta-mixed": ("dta", 7, 12),
    "dta-slots": ("dta", 2, 0),
    "dta-wide": ("dta", 13, None),
}
SEED = 17


MESHES = {
    "ep2": (2, EP, [4, 0]),
    # Trees so unlike that slots are faster than a common tree.
    "ep2-shapes": (2, EP, [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),
    "ep2-idle": (2, EP, [0, 0]),
    "ep2-overlap": (2, replace(EP, **OVERLAP), [7, 0]),
    "etp1-tp2": (2, sizes(etp=1, **SP), [0]),
    "ep2-over-tp2": (2, replace(EP, expert_tensor_parallel_size=1, **SP), [0]),
    "ep2-tp2": (4, replace(EP, expert_tensor_parallel_size=1, **SP), [3, 0]),
    "ep2-etp2": (4, replace(EP, **SP), [3, 0]),
    "ep4": (4, replace(EP, expert_model_parallel_size=4, expert_tensor_parallel_size=1, **SP), [7, 0]),
    "ep2-dp4-overlap": (4, replace(EP, **OVERLAP), [0, 0, 6, 0]),
}


def _combinations() -> list[tuple[str, ...]]:
    """(mesh, model, cut), and the forest if it is another one."""
    cases = [("ep2", "qwen3", "dense"), ("ep2", "deepseek", "dta-mixed")]
    cases += [("ep2-shapes", "deepseek", "dta-slots", "shapes"), ("ep2-idle", "deepseek", "dta")]
    cases += [("etp1-tp2", "qwen3-balanced", "dta-mixed"), ("ep2-over-tp2", "qwen3", "dta")]
    cases += [("ep2-dp4-overlap", "deepseek", "packed"), ("ep2-tp2", "deepseek", "packed")]
    cases += [("ep2-etp2", "qwen3-balanced", "dta-mixed"), ("ep2-overlap", "recompute", "dta-mixed")]
    cases += [("ep2", "qwen3", "dta", "unlike"), ("ep4", "deepseek", "dta-mixed")]
    return cases


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    forests = {"": (SEED, 6, 8), "unlike": (SEED, 8, 12), "shapes": (41, 6, 12)}
    samples = {
        name: random_training_samples(branching_sequences(seed_all(seed), count, longest), seed=seed)
        for name, (seed, count, longest) in forests.items()
    }
    models = {name: model_config(vocab_size=8, **settings) for name, settings in MODELS.items()}
    return MeshSuite(models, MESHES, samples, CUTS, moe_weights)


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    more = {"ep2 without reduction": suite.case("ep2", "qwen3", "packed", sabotage="reduction")}
    for changed in (False, True):
        more[f"ep2 siblings {changed}"] = suite.case(
            "ep2", "all-experts", "dta-wide", samples=siblings(changed), partition=[[0], [1, 2]]
        )
    return suite.run(_combinations(), tmp_path_factory.mktemp("moe"), more)


@pytest.mark.parametrize("combination", _combinations(), ids=" ".join)
def test_equals_one_process(suite, results, combination):
    mesh, name, _, *forest = combination
    suite.check(results[" ".join(combination)], mesh, name, *forest)


@pytest.mark.parametrize(("mesh", "cut"), [("ep2-idle", "dta"), ("ep2-tp2", "packed"), ("ep2-dp4-overlap", "packed")])
def test_biases_move_by_the_loads_of_all_sequences(suite, results, mesh, cut):
    model, weights = suite.models["deepseek"], suite.weights["deepseek"]
    expected = updated_expert_biases(model, weights, suite.samples[""])
    for rank in results[f"{mesh} deepseek {cut}"]:
        assert rank.expert_biases.keys() == expected.keys()
        for name, bias in rank.expert_biases.items():
            torch.testing.assert_close(bias, expected[name], rtol=0, atol=1e-7)


def test_a_sibling_changes_no_bit_of_another_rank(results):
    """The changed sequence is on the other rank, and its tokens go to this rank's experts too.

    All experts take all tokens here: where a change moves tokens to another expert, the sizes of matrix products
    change, and with them the rounding of other rows.
    """
    before, after = results["ep2 siblings False"], results["ep2 siblings True"]
    for rank in range(2):
        for sequence, (first, other) in enumerate(zip(before[rank].logprobs, after[rank].logprobs, strict=True)):
            is_changed = rank == 1 and sequence == 0
            assert np.array_equal(first, other) != is_changed


def test_lost_communication_would_be_seen(suite, results):
    assert suite.sees_fault(results["ep2 without reduction"], "ep2", "qwen3")


def test_initial_weights_do_not_depend_on_the_division(suite, results):
    expected = moe_weights(suite.models["qwen3"], seed=5)
    for name in ("ep2 qwen3 dense", "ep2-over-tp2 qwen3 dta"):
        parts_by_name = {}
        for rank in results[name]:
            for key, weight in rank.initial.items():
                shard_rank = rank.expert_tensor_rank if ".local_experts." in key else rank.tensor_rank
                parts_by_name.setdefault(key, {})[shard_rank] = weight
        for key, parts in parts_by_name.items():
            joined_ = join_shards([{key: parts[shard_rank]} for shard_rank in sorted(parts)], suite.models["qwen3"])
            assert torch.equal(joined_[key], expected[key]), key


PROMPTS = [np.arange(length) % 7 for length in (3, 9, 1, 5)]


def sample_on_rank(
    rank: int, argument: tuple[ModelConfig, ParallelConfig, dict[str, torch.Tensor], list[list[int]]]
) -> list[Any]:
    """Responses to this data-parallel rank's share of sequences: (sequence, tokens, logprobs)."""
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
    from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
    from megatron_dta.sampling.interface import GenerationRequest, generate, phase
    from megatron_dta.sampling.params import SamplingParams

    model_config, parallel, weights, shares = argument
    device = initialize_parallel(3, parallel)
    model = build_model(model_config, device, parallel)
    copy_shards(model, weights, model_config)
    indices = shares[current_mesh().data_rank]
    params = SamplingParams(max_response_tokens=7, eos_id=2, seed=4)
    engine, sampled = InProcessEngine(model, EngineSettings(max_requests=5)), []
    for iteration in range(2):
        with phase(engine, params, iteration):
            requests = [GenerationRequest(i, PROMPTS[i % len(PROMPTS)], 7, key=i) for i in indices]
            results = generate(engine, requests)
        sampled += [(iteration, i, r.token_ids, r.logprobs) for i, r in zip(indices, results, strict=True)]
    return sampled


@pytest.fixture(scope="module")
def sampled_alone(suite, tmp_path_factory) -> dict[tuple[int, int], list]:
    """Responses of one process, by iteration and sequence."""
    argument = suite.models["qwen3"], ParallelConfig(), suite.weights["qwen3"], [list(range(8))]
    (alone,) = run_on_ranks(sample_on_rank, argument, 1, tmp_path_factory.mktemp("alone"))
    return {(iteration, sequence): rest for iteration, sequence, *rest in alone}


@pytest.mark.parametrize(
    ("world_size", "parallel", "shares"),
    [(2, EP, [[], list(range(8))]), (4, replace(EP, **SP), [[0, 1, 2, 3, 4, 5], [6, 7]])],
    ids=["idle", "ep2-tp2"],
)
def test_ranks_that_share_experts_sample_synchronously(suite, sampled_alone, tmp_path, world_size, parallel, shares):
    model, weights, expected = suite.models["qwen3"], suite.weights["qwen3"], sampled_alone
    ranks = run_on_ranks(sample_on_rank, (model, parallel, weights, shares), world_size, tmp_path / "ranks")
    assert len({len(tokens) for tokens, _ in expected.values()}) > 2
    actual = {(iteration, sequence): rest for rank in ranks for iteration, sequence, *rest in rank}
    assert actual.keys() == expected.keys()
    for key, (tokens, logprobs) in actual.items():
        assert np.array_equal(tokens, expected[key][0])
        np.testing.assert_allclose(logprobs, expected[key][1], rtol=1e-10, atol=1e-13)
