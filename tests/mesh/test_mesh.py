"""Tensor, sequence and data parallelism against one process that trains each sequence alone: float64, every mode."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import assert_equal_tensors, seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.config.checks.mesh import check_tensor_parallel, check_world_size
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from mesh_cases import CUTS, FULL_RECOMPUTE, MeshSuite, joined
from mesh_worker import MeshCase, RankResult, count_collectives, run_on_ranks
from tree_engine_cases import (
    QWEN2,
    QWEN3,
    TEMPERATURE,
    VOCABULARY,
    branching_sequences,
    check_siblings,
    model_config,
    siblings,
    tree_config,
    weights_of,
)
from weight_shards import join_shards

GPT = {
    "disable_bias_linear": False,
    "normalization": "LayerNorm",
    "swiglu": False,
    "untie_embeddings_and_output_weights": True,
}
ARCHITECTURES = {"qwen3": QWEN3, "qwen2": QWEN2, "gpt": GPT, "recompute": QWEN3 | FULL_RECOMPUTE}
TP = ParallelConfig(tensor_model_parallel_size=2)
SP = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
DP = ParallelConfig()
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 900}
BY_AUTOGRAD = {"no_gradient_accumulation_fusion": True}
SEED = 17
MESHES = {
    "tp2": (2, TP, [0]),
    "tp2-sp": (2, SP, [0]),
    "dp2": (2, DP, [4, 0]),
    "dp2-overlap": (2, replace(DP, **OVERLAP), [7, 0]),
    "tp2-sp-autograd": (2, replace(SP, **BY_AUTOGRAD), [0]),
    "dp2-overlap-autograd": (2, replace(DP, **OVERLAP, **BY_AUTOGRAD), [7, 0]),
    "tp2-dp2": (4, TP, [4, 0]),
    "dp4-idle-overlap": (4, replace(DP, **OVERLAP), [2, 0, 6, 0]),
    "tp2-sp-dp2-idle-overlap": (4, replace(SP, **OVERLAP), [0, 0]),
}
# Every mode and way to recompute under sequence parallelism; each model, and cuts of each mode, on several meshes.
COMBINATIONS = [
    *(("tp2-sp", "qwen3", cut) for cut in CUTS if "dense" not in cut),
    *((mesh, "qwen3", "dta") for mesh in ("tp2", "dp2")),
    ("tp2-dp2", "qwen2", "packed"),
    *(("tp2", "gpt", "packed"), ("tp2-sp", "gpt", "dense")),
    ("dp2-overlap", "recompute", "dta-mixed"),
    *((f"{mesh}-autograd", "qwen3", "dta-mixed") for mesh in ("tp2-sp", "dp2-overlap")),
    ("dp4-idle-overlap", "qwen2", "dense-recomputed"),
    ("tp2-sp-dp2-idle-overlap", "qwen3", "dta"),
]


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    samples = random_training_samples(branching_sequences(seed_all(SEED), count=6, longest=8), seed=SEED)
    models = {name: model_config(**settings) for name, settings in ARCHITECTURES.items()}
    return MeshSuite(models, MESHES, {"": samples, "untrained trunk": _with_untrained_trunk()})


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    return suite.run(COMBINATIONS, tmp_path_factory.mktemp("mesh"), _special_cases(suite))


def _special_cases(suite: MeshSuite) -> dict[str, MeshCase]:
    untrained = suite.case("dp2-overlap", "qwen2", "dta", "untrained trunk", partition=[[2], [0, 1]])
    cases = {
        "dp2 sequence-mean": suite.case("dp2", "qwen3", "packed", aggregation="sequence-mean"),
        "dp2-overlap untrained root": untrained,
        "tp2-sp without reduction": suite.case("tp2-sp", "qwen3", "packed", sabotage="reduction"),
        "dp2 without reduction": suite.case("dp2", "qwen3", "packed", sabotage="reduction"),
        "tp2-sp without weight gradients": suite.case("tp2-sp", "qwen3", "packed", sabotage="weight gradients"),
        "tp2 without hidden gradients": suite.case("tp2", "qwen3", "packed", sabotage="hidden"),
    }
    even = _with_even_vocabulary(suite)
    cases["tp2-sp initial"] = suite.case("tp2-sp", "qwen2", "packed", model=even, weights=weights_of(even, seed=6))
    for segment_tokens in (13, 200):
        for changed in (False, True):
            samples, tree = siblings(changed), tree_config("dta", segment_tokens)
            cases[f"tp2-sp siblings {segment_tokens} {changed}"] = suite.case(
                "tp2-sp", "qwen3", "dta", samples=samples, partition=[list(range(len(samples)))], tree=tree
            )
    return cases


def _with_untrained_trunk() -> list:
    """The last backward of a step is then that of a segment without logprobs."""
    samples = siblings(False)
    masks = [np.arange(len(sample.token_ids)) >= 11 for sample in samples]
    return random_training_samples([sample.token_ids for sample in samples], seed=2, loss_masks=masks)


@pytest.mark.parametrize(("mesh", "name", "cut"), COMBINATIONS)
def test_equals_one_process(suite, results, mesh, name, cut):
    suite.check(results[f"{mesh} {name} {cut}"], mesh, name)


def test_metrics_and_the_gradient_norm_are_of_the_whole_step(suite, results):
    model, weights, tree = suite.models["qwen3"], suite.weights["qwen3"], tree_config("dta", 6)
    outcome, step = run_tree(model, weights, suite.samples[""], suite.objective, tree, TEMPERATURE)
    norm = float(torch.stack([gradient.square().sum() for gradient in outcome.gradients.values()]).sum().sqrt())
    for mesh in ("tp2", "tp2-sp", "dp2", "tp2-sp-dp2-idle-overlap"):
        rank = results[f"{mesh} qwen3 dta"][0]
        assert rank.grad_norm == pytest.approx(norm, rel=1e-6)  # Megatron measures it in float32
        assert rank.metrics.keys() == step.metrics.keys()
        for metric, value in step.metrics.items():
            assert rank.metrics[metric] == pytest.approx(float(value), rel=1e-10, abs=1e-14), metric


def test_a_mean_over_sequences_has_one_denominator_too(suite, results):
    model, weights = suite.models["qwen3"], suite.weights["qwen3"]
    expected = run_stock(model, weights, suite.samples[""], suite.objective, TEMPERATURE, "sequence-mean")
    actual = joined(results["dp2 sequence-mean"], model, suite.partition("dp2"))
    assert compare_outcomes(actual, expected).largest() < 1e-12


def test_a_last_backward_without_logprobs_starts_every_reduction(suite, results):
    actual = joined(results["dp2-overlap untrained root"], suite.models["qwen2"], [[2], [0, 1]])
    assert compare_outcomes(actual, suite.outcome("qwen2", "untrained trunk")).largest() < 1e-12


@pytest.mark.parametrize("segment_tokens", [13, 200])
def test_a_sibling_changes_no_bit_under_sequence_parallelism(results, segment_tokens):
    before, after = (results[f"tp2-sp siblings {segment_tokens} {changed}"] for changed in (False, True))
    for rank in range(2):
        check_siblings(before[rank].logprobs, after[rank].logprobs)


@pytest.mark.parametrize(
    ("mesh", "left_out"),
    [("tp2-sp", "reduction"), ("dp2", "reduction"), ("tp2-sp", "weight gradients"), ("tp2", "hidden gradients")],
)
def test_lost_communication_would_be_seen(suite, results, mesh, left_out):
    """The control of the tests above: each part of the communication left out breaks what they measure.

    So do weight gradients that do not reach their buffers.
    """
    assert suite.sees_fault(results[f"{mesh} without {left_out}"], mesh, "qwen3")


def test_initial_weights_do_not_depend_on_the_tensor_size(suite, results):
    """On a CPU every rank draws the whole weights from one random state and keeps its part."""
    model = _with_even_vocabulary(suite)
    unsharded = join_shards([rank.initial for rank in results["tp2-sp initial"]], model)
    assert_equal_tensors(unsharded, weights_of(model, seed=5))


def _with_even_vocabulary(suite: MeshSuite) -> ModelConfig:
    """A model whose embedding needs no more rows on two ranks than on one."""
    return replace(suite.models["qwen2"], vocab_size=VOCABULARY + 1)


def test_a_segment_communicates_as_megatron_does(suite, tmp_path):
    """Forward and backward of the embedding, of two layers and of the hidden states before the logprobs.

    Beyond those there are two reductions of a number or two a row, for the logprobs, however many chunks there are.
    """
    cases = [suite.case("tp2", "qwen3", "dta", parallel=parallel) for parallel in (TP, replace(SP, **BY_AUTOGRAD))]
    layers = suite.models["qwen3"].num_layers
    counted = [result for rank in run_on_ranks(count_collectives, cases, 2, tmp_path, "gloo") for result in rank]
    for case, (num_segments, with_logprobs, counts) in zip(cases * 2, counted, strict=True):
        per_segment = {"allreduce_.default": 1 + 2 * layers + 2 * layers + 1}
        if case.parallel.sequence_parallel:
            per_segment = {
                "_reduce_scatter_base_.default": 1 + 2 * layers + 2 * layers + 1,
                # Inputs are gathered again in the backward pass, for the gradients of the weights.
                "_allgather_base_.default": 2 * layers + 1 + 2 * layers + 2 * layers + 1,
            }
        expected = {collective: count * num_segments for collective, count in per_segment.items()}
        expected["allreduce_.default"] = expected.get("allreduce_.default", 0) + 2 * with_logprobs
        assert counts == expected


def test_impossible_meshes_are_refused(suite):
    four = ParallelConfig(tensor_model_parallel_size=4)
    with pytest.raises(InputError, match="--tensor-model-parallel-size 4 does not divide --num-query-groups 2"):
        check_tensor_parallel(suite.models["qwen3"], four)
    with pytest.raises(InputError, match="--tensor-model-parallel-size 4 does not divide the 6 processes"):
        check_world_size(four, 6)
