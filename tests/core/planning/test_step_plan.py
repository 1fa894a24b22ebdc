"""The plan of a step against slow twins: packs, root paths, edges, pairs and loss batches."""

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.packs import plan_packs
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


@pytest.mark.parametrize("seed", range(10))
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


def test_tokens_after_the_last_trained_one_are_not_computed():
    sequence = np.arange(10, dtype=np.int32)
    (sample,) = random_training_samples([sequence], 0, [(sequence > 0) & (sequence < 4)])
    plan = plan_step([sample], "dta", StepBudget(100))
    assert plan.segments.tree.num_tokens == sample.needed_length <= 4


def test_an_empty_batch_has_an_empty_plan():
    plan = plan_step([], "dta", StepBudget(100))
    assert plan.num_pairs == 0
    assert plan.training.schedule.ops == [[]]
    assert build_prefix_tree([]).num_tokens == 0
