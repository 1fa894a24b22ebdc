"""Experts divided among processes whose trees differ: float64, against one process that trains each sequence alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.config import ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_dta.model import build_stock_model
from megatron_dta.objectives import make_objective
from megatron_dta.parity import compare_outcomes, random_training_samples, run_stock
from megatron_dta.parity.plain_router import PlainRouter
from megatron_dta.parity.shards import join_shards
from megatron_dta.planning.expert_parallel.synchronized_plan import RankPlan, synchronized_plan
from megatron_dta.planning.segments.schedule import OpKind
from megatron_dta.planning.step.passes import PipelineShape
from megatron_dta.planning.step.plan import plan_step
from mesh_cases import GRPO, _partition, _siblings
from mesh_worker import MeshCase, RankResult, run_cases, run_on_ranks
from moe_cases import DEEPSEEK_BALANCED, QWEN3_BALANCED, QWEN3_MOE, moe_weights
from moe_mesh_cases import joined
from moe_worker import sample
from tree_engine_cases import TEMPERATURE, branching_sequences, model_config, tree_config

EP = ParallelConfig(expert_model_parallel_size=2)
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 900}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = {
    "qwen3": QWEN3_MOE,
    "qwen3-balanced": QWEN3_BALANCED,
    "deepseek": DEEPSEEK_BALANCED,
    "grouped": DEEPSEEK_BALANCED | {"moe_grouped_gemm": True},
    "grouped-recompute": QWEN3_BALANCED | FULL_RECOMPUTE | {"moe_grouped_gemm": True},
    "recompute": QWEN3_BALANCED | FULL_RECOMPUTE,
    "all-experts": QWEN3_MOE | {"moe_router_topk": 6},
}
CUTS = {
    "dense": ("dense", 9, None),
    "packed": ("packed", 45, 0),
    "dta": ("dta", 6, None),
    "dta-mixed": ("dta", 7, 12),
    "dta-recomputed": ("dta", 9, 0),
    "dta-slots": ("dta", 2, 0),
}
SEED = 17


def _meshes(count: int) -> dict[str, tuple[int, ParallelConfig, list[list[int]]]]:
    """(processes, mesh, samples of each data-parallel rank)."""
    return {
        "ep2": (2, EP, _partition(count, [4, 0])),
        # Trees so unlike that slots are faster than a common tree.
        "ep2-shapes": (2, EP, [[4, 5, 7, 9, 10, 12, 13, 14], [0, 1, 2, 3, 6, 8, 11]]),
        "ep2-idle": (2, EP, _partition(count, [0, count])),
        "ep2-overlap": (2, replace(EP, **OVERLAP), _partition(count, [9, 0])),
        "etp1-tp2": (2, ParallelConfig(expert_tensor_parallel_size=1, **SP), _partition(count, [count])),
        "ep2-over-tp2": (2, replace(EP, expert_tensor_parallel_size=1, **SP), _partition(count, [count])),
        "ep2-tp2": (4, replace(EP, expert_tensor_parallel_size=1, **SP), _partition(count, [3, 0])),
        "ep2-etp2": (4, replace(EP, **SP), _partition(count, [3, 0])),
        "ep4": (
            4,
            replace(EP, expert_model_parallel_size=4, expert_tensor_parallel_size=1, **SP),
            _partition(count, [9, 0]),
        ),
        "ep2-dp4": (4, EP, _partition(count, [1, 0, 6, 0])),
        "ep2-dp4-overlap": (4, replace(EP, **OVERLAP), _partition(count, [0, 0, 6, 0])),
    }


def _combinations() -> list[tuple[str, str, str]]:
    """(mesh, model, cut)."""
    found = [("ep2", "qwen3", cut) for cut in CUTS]
    found += [("ep2", name, "dta-mixed") for name in ("qwen3-balanced", "deepseek", "recompute")]
    found += [("ep2-shapes", name, "dta-slots") for name in ("qwen3", "deepseek")]
    found += [("ep2-idle", name, "dta") for name in ("qwen3", "deepseek")]
    found += [("etp1-tp2", "qwen3-balanced", "dta-mixed")]
    found += [("ep2-overlap", "qwen3", "dta"), ("ep2-over-tp2", "deepseek", "dta")]
    found += [(mesh, "qwen3-balanced", "dta-mixed") for mesh in ("ep2-tp2", "ep2-etp2", "ep2-dp4")]
    found += [("ep4", "deepseek", "dta-mixed"), ("ep2-over-tp2", "qwen3", "dta")]
    found += [("ep2-dp4-overlap", "qwen3", "dta"), ("ep2-tp2", "deepseek", "dense"), ("ep2-dp4", "deepseek", "packed")]
    found += [(mesh, "grouped", "dta-mixed") for mesh in ("ep2", "etp1-tp2", "ep2-over-tp2", "ep2-tp2", "ep2-etp2")]
    found += [("ep2-idle", "grouped", "dta"), ("ep2-overlap", "grouped-recompute", "dta"), ("ep4", "grouped", "packed")]
    return found


class _References:
    def __init__(self) -> None:
        self.samples = random_training_samples(branching_sequences(seed_all(SEED), count=12, longest=30), seed=SEED)
        self.objective = make_objective(ObjectiveConfig(**GRPO))
        self.models = {name: model_config(vocab_size=8, **settings) for name, settings in MODELS.items()}
        self.weights = {name: moe_weights(model, seed=5) for name, model in self.models.items()}
        self.meshes = _meshes(len(self.samples))
        self.outcomes = {
            name: run_stock(model, self.weights[name], self.samples, self.objective, TEMPERATURE)
            for name, model in self.models.items()
        }

    def case(self, mesh: str, name: str, cut: str, **changes: object) -> MeshCase:
        _, parallel, partition = self.meshes[mesh]
        return replace(
            MeshCase(
                self.models[name],
                parallel,
                tree_config(*CUTS[cut]),
                self.samples,
                partition,
                self.weights[name],
                GRPO,
                TEMPERATURE,
            ),
            **changes,
        )


@pytest.fixture(scope="module")
def references() -> _References:
    return _References()


@pytest.fixture(scope="module")
def results(references, tmp_path_factory) -> dict[str, list[RankResult]]:
    """Of every case, the results in order of rank."""
    found = {}
    for world_size in (2, 4):
        cases = {
            f"{mesh} {name} {cut}": references.case(mesh, name, cut)
            for mesh, name, cut in _combinations()
            if references.meshes[mesh][0] == world_size
        }
        if world_size == 2:
            for changed in (False, True):
                samples = _siblings(changed)
                cases[f"siblings {changed}"] = references.case(
                    "ep2", "all-experts", "dta", samples=samples, partition=[[0], [1, 2]]
                )
            cases["without reduction"] = references.case("ep2", "qwen3", "dta", sabotage="reduction")
        ranks = run_on_ranks(run_cases, cases, world_size, tmp_path_factory.mktemp("moe") / str(world_size))
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


def test_ranks_of_other_shapes_run_in_slots(references) -> None:
    """In the case of that name: a backward's segments are not those of any one forward."""
    _, segment_tokens, activation_tokens = CUTS["dta-slots"]
    steps = [
        plan_step([references.samples[i] for i in part], "dta", segment_tokens, activation_tokens=activation_tokens)
        for part in references.meshes["ep2-shapes"][2]
    ]
    plans = [
        synchronized_plan(step, [RankPlan.of(s) for s in steps], own, PipelineShape()) for own, step in enumerate(steps)
    ]
    together: dict[OpKind, set[tuple[int, ...]]] = {OpKind.FORWARD: set(), OpKind.BACKWARD: set()}
    for ops in zip(*(plan.training.schedule.ops[0] for plan in plans), strict=True):
        assert ops[0].kind is ops[1].kind
        together[ops[0].kind].add(tuple(op.segment for op in ops))
    assert together[OpKind.FORWARD] != together[OpKind.BACKWARD]


@pytest.mark.parametrize(("mesh", "name", "cut"), _combinations(), ids=lambda value: str(value))
def test_equals_one_process(references, results, mesh, name, cut):
    outcome = joined(results[f"{mesh} {name} {cut}"], references.models[name], references.meshes[mesh][2])
    expected = references.outcomes[name]
    assert outcome.gradients.keys() == expected.gradients.keys()
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


@pytest.mark.parametrize(("mesh", "cut"), [("ep2-idle", "dta"), ("ep2-tp2", "dense"), ("ep2-dp4", "packed")])
def test_biases_move_by_the_loads_of_all_sequences(references, results, mesh, cut):
    model, weights = references.models["deepseek"], references.weights["deepseek"]
    expected = expected_biases(model, weights, references.samples)
    for rank in results[f"{mesh} deepseek {cut}"]:
        assert rank.expert_biases.keys() == expected.keys()
        for name, bias in rank.expert_biases.items():
            torch.testing.assert_close(bias, expected[name], rtol=0, atol=1e-7)


def expected_biases(model: ModelConfig, weights: dict, samples: list) -> dict[str, torch.Tensor]:
    stock = build_stock_model(model, torch.device("cpu"), PlainRouter)
    stock.load_state_dict(weights)
    for sample_ in samples:
        tokens = torch.from_numpy(sample_.token_ids[: sample_.needed_length()].astype(np.int64))[None]
        length = tokens.shape[1]
        hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        stock(tokens, torch.arange(length)[None], hidden_from)
    found = {}
    for name, module in stock.named_modules():
        if isinstance(module, PlainRouter):
            loads, key = module.loads.double(), f"{name}.expert_bias"
            found[key] = weights[key] + model.moe_router_bias_update_rate * torch.sign(loads.mean() - loads).float()
    return found


def test_a_sibling_changes_no_bit_of_another_rank(results):
    """The changed sequence is on the other rank, and its tokens go to this rank's experts too.

    All experts take all tokens here: where a change moves tokens to another expert, the sizes of matrix products
    change, and with them the rounding of other rows.
    """
    before, after = results["siblings False"], results["siblings True"]
    for rank in range(2):
        for sequence, (one, other) in enumerate(zip(before[rank].logprobs, after[rank].logprobs, strict=True)):
            is_changed = rank == 1 and sequence == 0
            assert np.array_equal(one, other) != is_changed


def test_lost_communication_would_be_seen(references, results):
    ranks, partition = results["without reduction"], references.meshes["ep2"][2]
    try:
        worst = compare_outcomes(joined(ranks, references.models["qwen3"], partition), references.outcomes["qwen3"])
    except AssertionError:
        return  # the ranks do not even agree
    assert worst.gradient > 1e-3


def test_initial_weights_do_not_depend_on_the_division(references, results):
    whole = moe_weights(references.models["qwen3"], seed=5)
    names = ["ep2 qwen3 dense", "ep2-over-tp2 qwen3 dta", "ep2-dp4-overlap qwen3 dta"]
    for name in [*names, "ep2-overlap grouped-recompute dta"]:
        found = {}
        for rank in results[name]:
            for key, weight in rank.initial.items():
                place = rank.expert_tensor_rank if ".local_experts." in key else rank.tensor_rank
                found.setdefault(key, {})[place] = weight
        for key, parts in found.items():
            joined_ = join_shards([{key: parts[place]} for place in sorted(parts)], references.models["qwen3"])
            assert torch.equal(joined_[key], whole[key]), key


@pytest.mark.parametrize(
    ("world_size", "parallel", "shares"),
    [
        (2, EP, [[0, 1, 2, 3, 4, 5, 6], [7]]),
        (2, EP, [[], list(range(8))]),
        (4, replace(EP, **SP), [[0, 1, 2, 3, 4, 5], [6, 7]]),
    ],
    ids=["unequal", "idle", "ep2-tp2"],
)
def test_ranks_that_share_experts_sample_synchronously(references, tmp_path, world_size, parallel, shares):
    model, weights = references.models["qwen3"], references.weights["qwen3"]
    (alone,) = run_on_ranks(sample, (model, ParallelConfig(), weights, [list(range(8))]), 1, tmp_path / "alone")
    ranks = run_on_ranks(sample, (model, parallel, weights, shares), world_size, tmp_path / "ranks")
    expected = {(iteration, sequence): rest for iteration, sequence, *rest in alone}
    assert len({len(tokens) for tokens, _ in expected.values()}) > 2
    found = {(iteration, sequence): rest for rank in ranks for iteration, sequence, *rest in rank}
    assert found.keys() == expected.keys()
    for key, (tokens, logprobs) in found.items():
        assert np.array_equal(tokens, expected[key][0])
        np.testing.assert_allclose(logprobs, expected[key][1], rtol=1e-10, atol=1e-13)
