"""Tensor, sequence and data parallelism against one process that trains each sequence alone: float64, every mode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.common.errors import InputError
from megatron_dta.config import ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_dta.config.checks.all import check_tensor_parallel, check_world_size
from megatron_dta.objectives import make_objective
from megatron_dta.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from megatron_dta.parity.shards import join_shards, shard_weights
from mesh_cases import CUTS, GRPO, _partition, _siblings, joined
from mesh_worker import MeshCase, RankResult, count_collectives, run_cases, run_on_ranks
from tree_engine_cases import (
    QWEN2,
    QWEN3,
    TEMPERATURE,
    VOCABULARY,
    branching_sequences,
    model_config,
    tree_config,
    weights_of,
)

GPT = {
    "disable_bias_linear": False,
    "normalization": "LayerNorm",
    "swiglu": False,
    "untie_embeddings_and_output_weights": True,
}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ARCHITECTURES = {"qwen3": QWEN3, "qwen2": QWEN2, "gpt": GPT, "recompute": QWEN3 | FULL_RECOMPUTE}
TP = ParallelConfig(tensor_model_parallel_size=2)
SP = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
DP = ParallelConfig()
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 900}
BY_AUTOGRAD = {"no_gradient_accumulation_fusion": True}
SEED = 17


def _named_meshes(world_size: int, count: int) -> dict[str, tuple[ParallelConfig, list[list[int]]]]:
    whole = _partition(count, [count])
    if world_size == 2:
        return {
            "tp2": (TP, whole),
            "tp2-sp": (SP, whole),
            "dp2": (DP, _partition(count, [5, 0])),
            "dp2-overlap": (replace(DP, **OVERLAP), _partition(count, [9, 0])),
            "tp2-sp-autograd": (replace(SP, **BY_AUTOGRAD), whole),
            "dp2-overlap-autograd": (replace(DP, **OVERLAP, **BY_AUTOGRAD), _partition(count, [9, 0])),
        }
    return {
        "dp4-idle": (DP, _partition(count, [2, 0, 9, 0])),
        "tp2-dp2": (TP, _partition(count, [6, 0])),
        "tp2-sp-dp2": (SP, _partition(count, [12, 0])),
        "tp2-dp2-idle": (TP, _partition(count, [count, 0])),
        "dp4-idle-overlap": (replace(DP, **OVERLAP), _partition(count, [2, 0, 9, 0])),
        "tp2-sp-dp2-idle-overlap": (replace(SP, **OVERLAP), _partition(count, [0, count])),
    }


def _combinations() -> list[tuple[int, str, str, str]]:
    """(processes, mesh, architecture, cut): every mesh with every cut, the other models on what differs for them."""
    found = []
    for world_size, meshes in ((2, ("tp2", "tp2-sp", "dp2")), (4, ("dp4-idle", "tp2-dp2", "tp2-sp-dp2"))):
        for mesh in meshes:
            found += [(world_size, mesh, "qwen3", cut) for cut in CUTS]
            found += [(world_size, mesh, name, cut) for name in ("qwen2", "recompute") for cut in ("dta", "packed")]
    found += [(2, mesh, "gpt", cut) for mesh in ("tp2", "tp2-sp") for cut in ("dense", "dta-recomputed")]
    found += [(2, "dp2-overlap", name, "dta-mixed") for name in ("qwen3", "qwen2", "recompute")]
    found += [(2, f"{mesh}-autograd", "qwen3", "dta-mixed") for mesh in ("tp2-sp", "dp2-overlap")]
    found += [(4, "dp4-idle-overlap", name, cut) for name in ("qwen3", "qwen2") for cut in ("dta", "dense-recomputed")]
    found += [(4, mesh, "qwen3", "dta") for mesh in ("tp2-dp2-idle", "tp2-sp-dp2-idle-overlap")]
    return found


class _References:
    """Samples, weights and the outcome of training each sequence alone, computed once a model."""

    def __init__(self) -> None:
        self.samples = random_training_samples(branching_sequences(seed_all(SEED), count=12, longest=30), seed=SEED)
        self.objective = make_objective(ObjectiveConfig(**GRPO))
        self.models = {name: model_config(**settings) for name, settings in ARCHITECTURES.items()}
        self.weights = {name: weights_of(model, seed=5) for name, model in self.models.items()}
        self.outcomes = {
            name: run_stock(model, self.weights[name], self.samples, self.objective, TEMPERATURE)
            for name, model in self.models.items()
        }

    def case(self, parallel: ParallelConfig, partition: list, name: str, cut: str, **changes: object) -> MeshCase:
        case = MeshCase(
            self.models[name],
            parallel,
            tree_config(*CUTS[cut]),
            self.samples,
            partition,
            self.weights[name],
            GRPO,
            TEMPERATURE,
        )
        return replace(case, **changes)


@pytest.fixture(scope="module")
def references() -> _References:
    return _References()


@pytest.fixture(scope="module")
def results(references, tmp_path_factory) -> dict[int, dict[str, list[RankResult]]]:
    """Of every number of processes and every case, the results in order of rank."""
    found = {}
    for world_size in (2, 4):
        meshes = _named_meshes(world_size, len(references.samples))
        cases = {
            f"{mesh} {name} {cut}": references.case(*meshes[mesh], name, cut)
            for size, mesh, name, cut in _combinations()
            if size == world_size
        }
        cases |= _special_cases(references, meshes)
        ranks = run_on_ranks(run_cases, cases, world_size, tmp_path_factory.mktemp("mesh") / str(world_size))
        found[world_size] = {name: [rank[name] for rank in ranks] for name in cases}
    return found


def _special_cases(references: _References, meshes: dict) -> dict[str, MeshCase]:
    if "tp2" not in meshes:
        sequence_mean = references.case(*meshes["dp4-idle"], "qwen3", "dta", aggregation="sequence-mean")
        return {"sequence-mean": sequence_mean}
    untrained_root = references.case(
        meshes["dp2-overlap"][0], [[2], [0, 1]], "qwen2", "dta", samples=_with_untrained_trunk()
    )
    cases = {
        "untrained root": untrained_root,
        "without reduction, tp2-sp": references.case(*meshes["tp2-sp"], "qwen3", "dta", sabotage="reduction"),
        "without reduction, dp2": references.case(*meshes["dp2"], "qwen3", "dta", sabotage="reduction"),
        "without weight gradients, tp2-sp": references.case(
            *meshes["tp2-sp"], "qwen3", "dta", sabotage="weight gradients"
        ),
        "without hidden gradients": references.case(*meshes["tp2"], "qwen3", "dta", sabotage="hidden"),
    }
    even = _with_even_vocabulary(references)
    for mesh in ("tp2", "tp2-sp"):
        weights = weights_of(even, seed=6)
        cases[f"initial {mesh}"] = references.case(*meshes[mesh], "qwen2", "packed", model=even, weights=weights)
    for segment_tokens in (4, 5, 200):
        for changed in (False, True):
            samples = _siblings(changed)
            cases[f"siblings {segment_tokens} {changed}"] = references.case(
                SP,
                [list(range(len(samples)))],
                "qwen3",
                "dta",
                samples=samples,
                tree=tree_config("dta", segment_tokens),
            )
    return cases


def _with_untrained_trunk() -> list:
    """The last backward of a step is then that of a segment without logprobs."""
    samples = _siblings(False)
    masks = [np.arange(len(sample.token_ids)) >= 21 for sample in samples]
    return random_training_samples([sample.token_ids for sample in samples], seed=2, loss_masks=masks)


@pytest.mark.parametrize(("world_size", "mesh", "name", "cut"), _combinations(), ids=lambda value: str(value))
def test_equals_one_process(references, results, world_size, mesh, name, cut):
    _, partition = _named_meshes(world_size, len(references.samples))[mesh]
    expected = references.outcomes[name]
    outcome = joined(results[world_size][f"{mesh} {name} {cut}"], references.models[name], partition)
    assert outcome.gradients.keys() == expected.gradients.keys()
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


def test_metrics_and_the_gradient_norm_are_of_the_whole_step(references, results):
    outcome, step = run_tree(
        references.models["qwen3"],
        references.weights["qwen3"],
        references.samples,
        references.objective,
        tree_config("dta", 6),
        TEMPERATURE,
    )
    norm = float(torch.stack([gradient.square().sum() for gradient in outcome.gradients.values()]).sum().sqrt())
    for world_size, mesh in ((2, "tp2"), (2, "tp2-sp"), (2, "dp2"), (4, "dp4-idle"), (4, "tp2-sp-dp2")):
        rank = results[world_size][f"{mesh} qwen3 dta"][0]
        assert rank.grad_norm == pytest.approx(norm, rel=1e-6)  # Megatron measures it in float32
        assert rank.metrics.keys() == step.metrics.keys()
        for metric, value in step.metrics.items():
            assert rank.metrics[metric] == pytest.approx(float(value), rel=1e-10, abs=1e-14), metric


def test_a_mean_over_sequences_has_one_denominator_too(references, results):
    _, partition = _named_meshes(4, len(references.samples))["dp4-idle"]
    expected = run_stock(
        references.models["qwen3"],
        references.weights["qwen3"],
        references.samples,
        references.objective,
        TEMPERATURE,
        "sequence-mean",
    )
    errors = compare_outcomes(joined(results[4]["sequence-mean"], references.models["qwen3"], partition), expected)
    assert errors.largest() < 1e-12, errors


def test_a_last_backward_without_logprobs_starts_every_reduction(references, results):
    model, samples = references.models["qwen2"], _with_untrained_trunk()
    expected = run_stock(model, references.weights["qwen2"], samples, references.objective, TEMPERATURE)
    errors = compare_outcomes(joined(results[2]["untrained root"], model, [[2], [0, 1]]), expected)
    assert errors.largest() < 1e-12, errors


@pytest.mark.parametrize("segment_tokens", [4, 5, 200])
def test_a_sibling_changes_no_bit_under_sequence_parallelism(results, segment_tokens):
    before, after = (results[2][f"siblings {segment_tokens} {changed}"] for changed in (False, True))
    for rank in range(2):
        assert not np.array_equal(before[rank].logprobs[1], after[rank].logprobs[1])
        for sequence in (0, 2):
            assert np.array_equal(before[rank].logprobs[sequence], after[rank].logprobs[sequence])


@pytest.mark.parametrize(
    "left_out",
    [
        "without reduction, tp2-sp",
        "without reduction, dp2",
        "without weight gradients, tp2-sp",
        "without hidden gradients",
    ],
)
def test_lost_communication_would_be_seen(references, results, left_out):
    """The control of the tests above: each part of the communication left out breaks what they measure.

    So do weight gradients that do not reach their buffers.
    """
    ranks, expected = results[2][left_out], references.outcomes["qwen3"]
    partition = _named_meshes(2, len(references.samples))["dp2" if "dp2" in left_out else "tp2"][1]
    try:
        worst = compare_outcomes(joined(ranks, references.models["qwen3"], partition), expected).gradient
    except (AssertionError, ValueError):
        return  # the ranks do not even agree
    assert worst > 1e-3


@pytest.mark.parametrize("mesh", ["tp2", "tp2-sp"])
def test_initial_weights_do_not_depend_on_the_tensor_size(references, results, mesh):
    """On a CPU every rank draws the whole weights from one random state and keeps its part."""
    model = _with_even_vocabulary(references)
    whole = join_shards([rank.initial for rank in results[2][f"initial {mesh}"]], model)
    expected = weights_of(model, seed=5)
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], weight) for name, weight in expected.items())


def _with_even_vocabulary(references: _References) -> ModelConfig:
    """A model whose embedding needs no more rows on two ranks than on one."""
    return replace(references.models["qwen2"], vocab_size=VOCABULARY + 1)


@pytest.mark.parametrize(
    "parallel",
    [TP, SP, replace(TP, **BY_AUTOGRAD), replace(SP, **BY_AUTOGRAD)],
    ids=["tp2", "tp2-sp", "tp2-autograd", "tp2-sp-autograd"],
)
def test_a_segment_communicates_as_megatron_does(references, tmp_path, parallel):
    """Forward and backward of the embedding, of two layers and of the hidden states before the logprobs.

    Beyond those there are two reductions of a number or two a row, for the logprobs, however many chunks there are.
    """
    case = references.case(parallel, [[]], "qwen3", "dta")
    for num_segments, with_logprobs, counts in run_on_ranks(count_collectives, case, 2, tmp_path):
        layers = references.models["qwen3"].num_layers
        per_segment = {"allreduce_.default": 1 + 2 * layers + 2 * layers + 1}
        if parallel.sequence_parallel:
            per_segment = {
                "_reduce_scatter_base_.default": 1 + 2 * layers + 2 * layers + 1,
                # Inputs are gathered again in the backward pass, for the gradients of the weights.
                "_allgather_base_.default": 2 * layers + 1 + 2 * layers + 2 * layers + 1,
            }
        expected = {collective: count * num_segments for collective, count in per_segment.items()}
        expected["allreduce_.default"] = expected.get("allreduce_.default", 0) + 2 * with_logprobs
        assert counts == expected


def test_shards_join_to_the_whole(references):
    for name, model in references.models.items():
        shards = [shard_weights(references.weights[name], model, rank, 2) for rank in range(2)]
        whole = join_shards(shards, model)
        assert all(torch.equal(whole[key], weight) for key, weight in references.weights[name].items())


def test_impossible_meshes_are_refused(references):
    four = ParallelConfig(tensor_model_parallel_size=4)
    with pytest.raises(InputError, match="--tensor-model-parallel-size 4 does not divide --num-query-groups 2"):
        check_tensor_parallel(references.models["qwen3"], four)
    with pytest.raises(InputError, match="--tensor-model-parallel-size 4 does not divide the 6 processes"):
        check_world_size(four, 6)
    with pytest.raises(InputError, match="--sequence-parallel has no effect without"):
        check_tensor_parallel(references.models["qwen3"], ParallelConfig(sequence_parallel=True))
