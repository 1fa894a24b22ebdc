"""The plan of a step against slow twins: packs, root paths, edges, pairs and loss batches."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.ancestors import root_paths
from megatron_dta.core.planning.step.loss_batches import FREE_ELEMENTS, MAX_ELEMENTS, make_loss_batches
from megatron_dta.core.planning.step.modes import plan_forest, plan_packs
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.parity.cases import random_training_samples


def random_sequences(generator: np.random.Generator, count: int, longest: int, alphabet: int = 3) -> list[np.ndarray]:
    return [
        generator.integers(0, alphabet, size=generator.integers(1, longest + 1)).astype(np.int32) for _ in range(count)
    ]


def strings(plan, number_of_sequences: int) -> list[tuple[int, ...]]:
    return [tuple(plan.tree.token_ids[plan.tree.stream_indices(i)].tolist()) for i in range(number_of_sequences)]


def pack_tokens(sequences: list[np.ndarray]) -> int:
    return len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})


def fewest_tokens(sequences: list[np.ndarray], capacity: int) -> int:
    """Over all cuts of the sorted sequences into packs that fit."""
    ordered = sorted(sequences, key=lambda s: s.tolist())
    best = [0]
    for end in range(1, len(ordered) + 1):
        costs = [
            best[begin] + tokens for begin in range(end) if (tokens := pack_tokens(ordered[begin:end])) <= capacity
        ]
        best.append(min(costs))
    return best[-1]


@pytest.mark.parametrize("seed", range(30))
def test_packs_fit_and_compute_no_more_than_the_best_runs(seed):
    generator = seed_all(seed)
    sequences = random_sequences(generator, int(generator.integers(1, 14)), 7, alphabet=2)
    capacity = int(generator.integers(7, 16))
    plan = plan_packs(sequences, capacity)
    assert (plan.segment_parent == -1).all()
    assert plan.lengths.max() <= capacity
    assert pack_tokens(sequences) <= plan.tree.num_tokens <= fewest_tokens(sequences, capacity)
    assert strings(plan, len(sequences)) == [tuple(s.tolist()) for s in sequences]
    # Packs are separate trees: no token has its parent in another pack.
    start = np.repeat(plan.segment_start[:-1], plan.lengths)
    assert ((plan.tree.parent == -1) | (plan.tree.parent >= start)).all()


def test_sequences_that_are_no_neighbours_share_a_pack_where_that_fills_it():
    """Of a prefix of 2 tokens hang 5, 5, 3 and 3: runs of neighbours need 22 tokens in packs of 10."""
    sequences = [np.append([0, 0], np.full(n, token)) for token, n in ((1, 5), (2, 5), (3, 3), (4, 3))]
    sequences = [sequence.astype(np.int32) for sequence in sequences]
    assert fewest_tokens(sequences, 10) == 22
    assert plan_packs(sequences, 10).lengths.tolist() == [10, 10]


@pytest.mark.parametrize("seed", range(10))
def test_root_paths_are_the_ancestors_before_the_segment(seed):
    generator = seed_all(seed)
    plan = plan_forest(random_sequences(generator, 25, 30), "dta", StepBudget(int(generator.integers(1, 12))))
    paths = root_paths(plan)
    for segment, start in enumerate(plan.segment_start[:-1].tolist()):
        expected, token = [], int(plan.tree.parent[start])
        while token >= 0:
            expected.append(token)
            token = int(plan.tree.parent[token])
        assert paths.stream_indices(segment).tolist() == expected[::-1]
        assert paths.lengths[segment] == len(expected)


@pytest.mark.parametrize("mode", ["dense", "packed", "dta"])
@pytest.mark.parametrize("seed", range(6))
def test_edges_and_pairs_name_the_right_tokens(seed, mode):
    generator = seed_all(seed)
    sequences = [s for s in random_sequences(generator, 20, 14) if len(s) > 1]
    samples = random_training_samples(sequences, seed)
    plan = plan_step(samples, mode, StepBudget(14))
    tree, pair = plan.segments.tree, 0
    edges_used = set()
    for i, sample in enumerate(samples):
        stream = tree.stream_indices(i)
        for position in np.flatnonzero(sample.loss_mask).tolist():
            edge = int(plan.pair_edge[pair])
            assert plan.row_stream[plan.edge_row[edge]] == stream[position - 1]
            assert plan.edge_target[edge] == sample.token_ids[position]
            edges_used.add((int(stream[position - 1]), int(stream[position])))
            pair += 1
        assert plan.sequence_pairs[i + 1] == pair
    assert plan.num_pairs == pair
    assert len(plan.edge_row) == len(edges_used), "an edge that no sequence trains, or one that stands twice"
    assert sorted(plan.pair_rank.tolist()) == list(range(pair))
    by_rank = np.empty(pair, np.int64)
    by_rank[plan.pair_rank] = plan.pair_edge
    assert (np.diff(by_rank) >= 0).all()
    assert plan.pairs_per_edge.tolist() == np.bincount(plan.pair_edge, minlength=len(plan.edge_row)).tolist()
    assert plan.pairs_per_row.sum() == plan.pairs_per_edge.sum() == pair


@pytest.mark.parametrize("seed", range(6))
def test_a_segment_owns_its_rows_and_completes_its_sequences(seed):
    generator = seed_all(seed)
    samples = random_training_samples([s for s in random_sequences(generator, 30, 25) if len(s) > 1], seed)
    plan = plan_step(samples, "dta", StepBudget(6))
    seen = []
    for segment in range(plan.segments.num_segments):
        begin, end = plan.segments.segment_start[segment : segment + 2]
        rows = plan.row_stream[plan.segment_rows[segment] : plan.segment_rows[segment + 1]]
        assert ((begin <= rows) & (rows < end)).all()
        edges = plan.edge_row[plan.segment_edges[segment] : plan.segment_edges[segment + 1]]
        assert set(edges.tolist()) == set(range(*plan.segment_rows[segment : segment + 2].tolist()))
        pairs = plan.segment_pairs[segment + 1] - plan.segment_pairs[segment]
        assert pairs == plan.pairs_per_edge[plan.segment_edges[segment] : plan.segment_edges[segment + 1]].sum()
        for batch in plan.loss_batches[segment]:
            for sequence in batch.sequences.tolist():
                last = plan.pair_edge[plan.sequence_pairs[sequence + 1] - 1]
                assert begin <= plan.row_stream[plan.edge_row[last]] < end
                seen.append(sequence)
    assert sorted(seen) == list(range(len(samples)))


@pytest.mark.parametrize("seed", range(5))
def test_loss_batches_hold_each_pair_once_within_their_area(seed):
    generator = seed_all(seed)
    lengths = generator.integers(1, 5000, size=200)
    sequence_pairs = np.concatenate([[0], np.cumsum(lengths)])
    completed_in = generator.integers(0, 4, size=200)
    batches = make_loss_batches(sequence_pairs, completed_in, 5)
    assert len(batches) == 5
    assert batches[4] == []
    total = int(sequence_pairs[-1])
    indices = [batch.pair_index for segment in batches for batch in segment]
    used = np.concatenate([index[index < total] for index in indices])
    assert sorted(used.tolist()) == list(range(total))
    for index in indices:
        assert index.size <= max(MAX_ELEMENTS, index.shape[1])
        padding = (index == total).sum()
        assert padding <= index.size / 2 or index.size <= FREE_ELEMENTS
        for row in index:
            valid = row[row < total]
            assert (np.diff(valid) == 1).all()
            assert (row[len(valid) :] == total).all()


def test_tokens_after_the_last_trained_one_are_not_computed():
    sequence = np.arange(10, dtype=np.int32)
    (sample,) = random_training_samples([sequence], 0, [(sequence > 0) & (sequence < 4)])
    plan = plan_step([sample], "dta", StepBudget(100))
    assert plan.segments.tree.num_tokens == sample.needed_length() <= 4


def test_an_empty_batch_has_an_empty_plan():
    plan = plan_step([], "dta", StepBudget(100))
    assert plan.num_pairs == 0
    assert plan.training.schedule.ops == [[]]
    assert build_prefix_tree([]).num_tokens == 0
