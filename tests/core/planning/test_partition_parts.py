"""What partitions are made of: minima of runs, cuts and even runs; cost models."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.range_minimum import RangeMinimum
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.core.planning.partition.sequence_runs import SequenceRuns
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.tree import build_prefix_tree
from partition_cases import WHOLE_COSTS, cost, random_forest


def atoms_of(sequences: list, masks: list | None = None) -> SequenceRuns:
    return SequenceRuns.indivisible(SequenceCosts.of(build_prefix_tree(sequences), WHOLE_COSTS, masks))[0]


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 200])
def test_range_minimum(count: int) -> None:
    values = seed_all(count).integers(0, 1000, count)
    begin, end = np.array([(b, e) for b in range(count) for e in range(b + 1, count + 1)]).T
    expected = [values[b:e].min() for b, e in zip(begin, end, strict=True)]
    assert RangeMinimum(values)(begin, end).tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_costs_of_any_set_of_sequences(seed: int) -> None:
    """Borders alone give the cost of a union: exactly where all that share an edge train it or not."""
    rng = seed_all(seed)
    sequences, _ = random_forest(rng, 12, one_root=bool(seed % 2))
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    costs = SequenceCosts.of(build_prefix_tree(sequences), WHOLE_COSTS, masks)
    for _ in range(30):
        chosen = np.flatnonzero(rng.random(len(sequences)) < 0.5)
        stops = np.unique(costs.stop_of_sequence[chosen])
        total = costs.alone[stops].sum() - costs.between(stops[:-1], stops[1:]).sum()
        assert total == cost(WHOLE_COSTS, [sequences[i] for i in chosen], [masks[i] for i in chosen])


def best_cut(atoms: SequenceRuns, limit: float) -> float:
    """Least cost of chunks within a limit, by trying every cut."""

    def value(cuts: tuple[int, ...]) -> float:
        cost = atoms.joined(np.array([0, *cuts])).cost
        sizes = np.diff([0, *cuts, len(atoms)])
        return float(cost.sum()) if np.all((cost <= limit) | (sizes == 1)) else np.inf

    bounds = range(1, len(atoms))
    return min(value(cuts) for size in range(len(atoms)) for cuts in itertools.combinations(bounds, size))


@pytest.mark.parametrize("seed", range(4))
def test_cuts_and_even_runs_against_all_cuts(seed: int) -> None:
    rng = seed_all(seed)
    atoms = atoms_of(random_forest(rng, 11, one_root=bool(seed % 2))[0])
    for limit in (0.0, float(np.median(atoms.cost)), 2.5 * atoms.cost.max(), 10 * atoms.cost.sum()):
        chunks = atoms.joined(atoms.cut(limit))
        assert chunks.cost.sum() == pytest.approx(best_cut(atoms, limit), rel=1e-5)
    for most in (1, 2, 3, len(atoms)):
        cuts = itertools.combinations(range(1, len(atoms)), min(most, len(atoms)) - 1)
        least = min(atoms.joined(np.array([0, *cut])).cost.max() for cut in cuts)
        runs = atoms.even_runs(most)
        assert len(runs) <= most
        assert atoms.joined(runs).cost.max() <= least * (1 + 1e-5)


def test_names_of_scattered_sequences_stay_together() -> None:
    """A name whose sequences are not neighbours costs what its sequences cost, and is one run."""
    rng = seed_all(3)
    sequences, masks = random_forest(rng, 40, longest=15)
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    names = [f"n{rng.integers(0, 8)}" for _ in sequences]
    costs = SequenceCosts.of(build_prefix_tree(sequences), WHOLE_COSTS, masks, names)
    atoms, run_of_stop = SequenceRuns.indivisible(costs)
    assert len(atoms) == len(set(names))
    for atom in range(len(atoms)):
        mine = [i for i in range(len(names)) if run_of_stop[costs.stop_of_sequence[i]] == atom]
        assert len({names[i] for i in mine}) == 1
        assert atoms.cost[atom] == cost(WHOLE_COSTS, [sequences[i] for i in mine], [masks[i] for i in mine])


def test_cost_model_of_a_shape() -> None:
    shape = CostModel.from_shape(DecoderShape(28, 2048, 6144, 16, 8, 128, 151936))
    for name, value in vars(CostModel()).items():
        assert getattr(shape, name) == pytest.approx(value, rel=1e-4), name
    assert CostModel(2.0, 3.0, 5.0, 7.0, 4).cost(8, 10, 1) == 2 * 8 + 3 * 10 + 5
    assert CostModel(2.0, 3.0, 5.0, 12.0, 4).cost(8, 10, 1) == 12 * 2 + 3 * 10 + 5
    forward, backward = CostModel(3.0, 0.0, 6.0, 32.0, 4).segment_seconds(
        np.array([4, 7, 9, 30]), 0, np.array([0, 0, 1, 0])
    )
    np.testing.assert_allclose(forward, [10.0, 10.0, 11.0, 30.0])
    np.testing.assert_allclose(backward, [22.0, 22.0, 22.0, 60.0])
