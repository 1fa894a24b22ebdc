"""The plan of a step against slow twins: packs, root paths, edges, pairs, operations; and how few files it enters."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import megatron_dta
from conftest import seed_all
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.planning.step.packs import plan_packs
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.parity.cases import random_training_samples
from tree_engine_cases import branching_sequences


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


PACKAGE = Path(megatron_dta.__file__).parent
MOST_FILES = 8


@pytest.mark.parametrize("segment_tokens", [None, 7])
def test_a_plan_for_one_rank_enters_few_files(segment_tokens: int | None) -> None:
    sequences = branching_sequences(np.random.default_rng(0), count=9, longest=40)
    samples = [TrainingSample(tokens, np.arange(len(tokens)) > 0) for tokens in sequences]
    entered = set()
    sys.setprofile(lambda frame, event, argument: entered.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        plan = plan_step(samples, budget=StepBudget(segment_tokens))
    finally:
        sys.setprofile(None)
    assert plan.segments.num_segments > 3 * (segment_tokens is not None)
    files = sorted(str(Path(name).relative_to(PACKAGE)) for name in entered if name.startswith(str(PACKAGE)))
    assert "core/planning/plan_step.py" in files
    assert len(files) <= MOST_FILES, files


def test_operations_are_those_of_every_product_written_out():
    generator = seed_all(4)
    trunk = generator.integers(0, 50, 9)
    tails = [generator.integers(0, 50, n) for n in (5, 11, 1)]
    masks = [np.arange(9 + len(tail)) >= 7 for tail in tails]
    samples = [
        TrainingSample(np.append(trunk, tail).astype(np.int32), mask) for tail, mask in zip(tails, masks, strict=True)
    ]
    counts = StepCounts.of(plan_step(samples, "dta", StepBudget(6)))
    tokens = {tuple(sample.token_ids[: i + 1].tolist()) for sample in samples for i in range(len(sample.token_ids))}
    assert counts.tokens == len(tokens)
    assert counts.pairs == sum(len(prefix) for prefix in tokens)
    rows = {tuple(sample.token_ids[:i].tolist()) for sample in samples for i in np.flatnonzero(sample.loss_mask)}
    assert counts.rows == len(rows)
    hidden, ffn, heads, groups, size, vocabulary = 8, 20, 4, 2, 3, 50
    shape, forward = DecoderShape(5, hidden, ffn, heads, groups, size, vocabulary), 0.0
    for prefix in tokens:
        products = [(hidden, heads * size), (hidden, groups * size), (hidden, groups * size), (heads * size, hidden)]
        products += [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
        forward += 5 * (sum(2 * a * b for a, b in products) + 2 * 2 * heads * size * len(prefix))
    forward += counts.rows * 2 * hidden * vocabulary
    assert counts.flops(shape) == pytest.approx(3 * forward)
    routers = 5 * len(tokens) * 2 * hidden * 7
    experts = replace(shape, num_experts=7, moe_layers=(), moe_router_topk=2, moe_ffn_hidden_size=ffn // 2)
    assert counts.flops(experts) == pytest.approx(3 * (forward + routers))
