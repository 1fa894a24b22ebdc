"""Partitions of a forest: against all others on small forests, counted by sets of prefixes, and on real rollouts."""

import time
from collections import Counter

import numpy as np
import pytest

from common.planning.partition_baselines import contiguous
from common.planning.partition_bound import least_slowest
from conftest import rollout_file, seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import Partition, partition_costs, partition_sequences, trained_parts
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.tree import build_prefix_tree
from partition_cases import WHOLE_COSTS, assignments, cost, counts, random_forest, turns_forest
from segment_planner_cases import ROLLOUTS


def check(partition: Partition, sequences: list, masks: list, model: CostModel = WHOLE_COSTS) -> None:
    """Every sequence on one rank, and every figure as counted from that rank's sequences alone."""
    rank = partition.rank_of_sequence
    assert rank.shape == (len(sequences),)
    assert np.array_equal(np.sort(np.concatenate([partition.sequences_of(r) for r in range(partition.num_ranks)])),
                          np.arange(len(sequences)))  # fmt: skip
    for r in range(partition.num_ranks):
        mine = [sequences[i] for i in partition.sequences_of(r)], [masks[i] for i in partition.sequences_of(r)]
        figures = partition.tokens_per_rank[r], partition.pairs_per_rank[r], partition.edges_per_rank[r]
        assert figures == counts(*mine)
        assert partition.cost_per_rank[r] == pytest.approx(cost(model, *mine), rel=1e-12)
    assert partition.total_cost == pytest.approx(partition.cost_per_rank.sum(), rel=1e-12)
    tokens = counts(sequences, masks)[0]
    assert partition.unique_tokens == tokens
    assert partition.duplicated_tokens == partition.tokens_per_rank.sum() - tokens


@pytest.mark.parametrize("one_root", [False, True])
def test_against_every_partition_of_small_forests(one_root: bool) -> None:
    """The slowest rank is mostly as fast as can be, never much slower; the bound for it holds."""
    slower = []
    for seed in range(30):
        rng = seed_all(seed)
        ranks = int(rng.integers(2, 4))
        sequences, masks = random_forest(rng, int(rng.integers(2, 8)), one_root=one_root)
        partition = partition_sequences(sequences, ranks, masks, WHOLE_COSTS)
        check(partition, sequences, masks)
        costs: dict[tuple[int, ...], float] = {}

        def cost_of(members: tuple[int, ...], costs=costs, sequences=sequences, masks=masks) -> float:
            if members not in costs:
                costs[members] = cost(WHOLE_COSTS, [sequences[i] for i in members], [masks[i] for i in members])
            return costs[members]

        least = min(
            max(cost_of(tuple(np.flatnonzero(np.equal(ranking, rank)).tolist())) for rank in range(ranks))
            for ranking in assignments(len(sequences), ranks)
        )
        tree_costs = SequenceCosts.of(build_prefix_tree(sequences), WHOLE_COSTS, masks)
        assert least_slowest(tree_costs, ranks) <= least * (1 + 1e-12)
        slower.append(partition.cost_per_rank.max() / least)
    assert np.mean(np.array(slower) < 1 + 1e-9) >= 0.8
    assert np.mean(slower) < 1.01
    assert max(slower) < 1.15


@pytest.mark.parametrize("seed", range(4))
def test_figures_of_random_forests(seed: int) -> None:
    rng = seed_all(seed)
    if seed % 2:
        sequences, masks = random_forest(rng, int(rng.integers(1, 60)), longest=30)
    else:
        sequences, masks, _ = turns_forest(rng, int(rng.integers(1, 8)), 3, 6)
    model = CostModel(1e-5, 1e-7, 3e-6, 1e-3, 64)
    for ranks in (1, 2, 7, 40):
        check(partition_sequences(sequences, ranks, masks, model), sequences, masks, model)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_sequences_does_not_matter(seed: int) -> None:
    """Each rank gets the same sequences at bit-equal costs in any order."""
    rng = seed_all(seed)
    sequences, masks, _ = turns_forest(rng, 6, 4, 5)
    more, more_masks = random_forest(rng, 40)
    sequences, masks = sequences + more, masks + more_masks
    for ranks in (3, 8, 50):
        results = []
        for _ in range(3):
            order = rng.permutation(len(sequences))
            partition = partition_sequences([sequences[i] for i in order], ranks, [masks[i] for i in order])
            pairs = zip(order, partition.rank_of_sequence, strict=True)
            held = Counter((sequences[i].tobytes(), masks[i].tobytes(), int(rank)) for i, rank in pairs)
            results.append((held, partition.cost_per_rank.tolist(), partition.total_cost))
        assert results[0] == results[1] == results[2]


def test_ranks_without_work() -> None:
    rng = seed_all(0)
    nothing = partition_sequences([], 3)
    assert (nothing.num_ranks, nothing.total_cost, nothing.max_over_mean) == (3, 0.0, 1.0)
    alone = [rng.integers(0, 9, 50).astype(np.int32)]
    assert np.count_nonzero(partition_sequences(alone, 4).cost_per_rank) == 1
    # Equal sequences: one rank does it all.
    equal = alone * 6
    assert np.count_nonzero(partition_sequences(equal, 4).cost_per_rank) == 1
    # Beside one long sequence, the others need fewer ranks than there are.
    long = [np.concatenate([[1, 2, 3], rng.integers(5, 99, 4000)]).astype(np.int32)]
    short = [np.array([1, 2, 3, 100 + i], np.int32) for i in range(9)]
    partition = partition_sequences(long + short, 8)
    assert np.count_nonzero(partition.cost_per_rank) < 8
    assert partition.cost_per_rank.max() == partition_sequences(long, 1).total_cost


@pytest.mark.parametrize(
    ("name", "sample_granularity"),
    [*((name, "trajectory") for name in ROLLOUTS[::3]), ("swe_openhands_django", "turn")],
)
def test_real_rollouts(name: str, sample_granularity: str) -> None:
    """Ranks are even where possible, at little more total cost than contiguous runs of leaves, and in little time."""
    rollouts = load_rollouts(rollout_file(f"{name}.npz"), sample_granularity=sample_granularity)
    sequences, masks = trained_parts(rollouts)
    for ranks, even, most_duplicated in ((8, 1.03, 1.01), (64, 1.06, 1.03)):
        begin = time.process_time()
        tree = build_prefix_tree(sequences)
        costs = SequenceCosts.of(tree, CostModel(), masks)
        partition = partition_costs(costs, ranks)
        seconds = time.process_time() - begin
        bound = least_slowest(costs, ranks)
        print(f"{ranks} ranks: {partition.max_over_mean:.4f}, bound {bound / partition.cost_per_rank.mean():.4f}")
        assert bound <= partition.cost_per_rank.max() * (1 + 1e-12)
        if bound <= even * partition.cost_per_rank.mean():
            assert partition.max_over_mean <= even
        other = Partition.of(costs, contiguous(tree, ranks), ranks)
        assert partition.total_cost <= most_duplicated * other.total_cost
        assert partition.cost_per_rank.max() <= other.cost_per_rank.max()
        assert seconds < 5, "a second on an idle machine; the rest is room for a busy one"
