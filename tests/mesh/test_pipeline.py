"""Pipeline parallelism against one process that trains each sequence alone: float64, every mode, mixed meshes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_dta.config import ModelConfig, ObjectiveConfig
from megatron_dta.objectives import make_objective
from megatron_dta.parity import compare_outcomes, run_stock
from megatron_dta.parity.outcome import Outcome
from megatron_dta.parity.shards import join_shards
from mesh_worker import MeshCase, RankResult, run_cases, run_on_ranks
from pipeline_shared import ARCHITECTURES, CUTS, GRPO, MESHES, _samples
from tree_engine_cases import (
    TEMPERATURE,
    model_config,
    tree_config,
    weights_of,
)

TWO = ("pp2", "pp2-vpp2", "pp2-uneven", "pp2-embedding-alone")
FORESTS = ("bushy", "deep", "wide")


def _partition(mesh: str, count: int) -> list[list[int]]:
    whole = list(range(count))
    if mesh in ("pp2-dp2", "pp2-ep2"):
        return [whole[: count // 3], whole[count // 3 :]]
    return [whole, []] if "idle" in mesh else [whole]


def _combinations() -> list[tuple[str, str, str, str]]:
    """(mesh, architecture, cut, forest)."""
    dense = [mesh for mesh in MESHES if "ep2" not in mesh]
    found = [(mesh, "tied", cut, "bushy") for mesh in dense for cut in CUTS]
    found += [(mesh, name, "dta-mixed", "bushy") for mesh in dense for name in ("untied", "recompute")]
    found += [("pp2-ep2", "experts", cut, "bushy") for cut in CUTS]
    found += [("pp2-vpp2-ep2-idle", "experts", cut, "bushy") for cut in ("dta", "dta-recomputed", "one")]
    found += [(mesh, "experts", "dta-mixed", "bushy") for mesh in ("pp2", "pp2-vpp2", "pp4", "pp2-dp2")]
    found += [(mesh, "tied", "dta", forest) for mesh in dense for forest in ("deep", "wide")]
    return found


class _References:
    def __init__(self) -> None:
        self.samples = {forest: _samples(forest) for forest in FORESTS}
        self.objective = make_objective(ObjectiveConfig(**GRPO))
        self.models = {name: model_config(**settings) for name, settings in ARCHITECTURES.items()}
        self.weights = {name: weights_of(model, seed=5) for name, model in self.models.items()}
        pairs = {(name, forest) for _, name, _, forest in _combinations()}
        self.outcomes = {
            (name, forest): run_stock(
                self.models[name], self.weights[name], self.samples[forest], self.objective, TEMPERATURE
            )
            for name, forest in sorted(pairs)
        }

    def case(self, mesh: str, name: str, cut: str, forest: str) -> MeshCase:
        samples = self.samples[forest]
        tree, weights = tree_config(*CUTS[cut]), self.weights[name]
        return MeshCase(
            self.models[name], MESHES[mesh], tree, samples, _partition(mesh, len(samples)), weights, GRPO, TEMPERATURE
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
            " ".join(combination): references.case(*combination)
            for combination in _combinations()
            if (combination[0] in TWO) == (world_size == 2)
        }
        ranks = run_on_ranks(run_cases, cases, world_size, tmp_path_factory.mktemp("pipeline") / str(world_size))
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


def joined(ranks: list[RankResult], model: ModelConfig, partition: list[list[int]]) -> Outcome:
    """The outcome of all ranks as if one had computed it; whatever ranks should agree on must agree bit for bit."""
    assert len({rank.loss for rank in ranks}) == 1
    assert all(rank.metrics == ranks[0].metrics and rank.grad_norm == ranks[0].grad_norm for rank in ranks)
    stages: dict[tuple[int, int], list[RankResult]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.tensor_rank):
        stages.setdefault((rank.data_rank, rank.stage), []).append(rank)
    gradients: dict[str, torch.Tensor] = {}
    for group in stages.values():
        for name, gradient in join_shards([rank.gradients for rank in group], model).items():
            # On all replicas the same, a tied weight also on the first and the last stage; experts may be on one only.
            assert torch.equal(gradients.setdefault(name, gradient), gradient), name
    logprobs: dict[int, np.ndarray] = {}
    for rank in ranks:
        assert len(rank.logprobs) == len(partition[rank.data_rank])
        for index, values in zip(partition[rank.data_rank], rank.logprobs, strict=True):
            assert np.array_equal(logprobs.setdefault(index, values), values)
    return Outcome(ranks[0].loss, [logprobs[index] for index in sorted(logprobs)], gradients)


@pytest.mark.parametrize(("mesh", "name", "cut", "forest"), _combinations())
def test_equals_one_process(references, results, mesh, name, cut, forest):
    partition = _partition(mesh, len(references.samples[forest]))
    outcome = joined(results[f"{mesh} {name} {cut} {forest}"], references.models[name], partition)
    expected = references.outcomes[name, forest]
    assert outcome.gradients.keys() == expected.gradients.keys()
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors
