"""Partitions of ranks that share experts: predicted as training plans, and chosen by these predictions on all ranks."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import partition_sequences, trained_parts
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep
from megatron_dta.extras.expert_parallel.planning.synchronized_plan import RankPlan, synchronized_plan
from megatron_dta.training.data.division import partition_samples
from partition_cases import turns_forest
from tree_engine_cases import branching_sequences

TOKENS_ONLY = CostModel(3.0, 0.0, 0.0, 0.0, 16)


def tokens_of_training(step: GroupStep, rank: np.ndarray, group: int) -> int:
    """Tokens of the longest segments of all ops that training plans for a group; a backward counts twice, or three
    times with its forward."""
    shape, budget, samples = step.shape, step.budget, []
    ranks = range(group * step.group_size, (group + 1) * step.group_size)
    for member in ranks:
        numbers = np.flatnonzero(rank == member)
        samples.append([TrainingSample(step.sequences[i], step.masks[i]) for i in numbers])
    longest = max(len(sample.token_ids) for rank_samples in samples for sample in rank_samples)
    memory = max(3 * longest // 2, 8 * budget.segment_tokens)
    budget = StepBudget(budget.segment_tokens, memory, budget.activation_tokens)
    plans = [plan_step(rank_samples, "dta", budget, shape) for rank_samples in samples]
    training = synchronized_plan(plans[0], [RankPlan.of(plan) for plan in plans], 0, shape).training
    ops, most = training.schedule.ops[0], training.most_tokens[0]
    times = {op: 1 if op.kind is OpKind.FORWARD else 2 + (not training.kept[0, op.segment]) for op in ops}
    return sum(tokens * times[op] for op, tokens in zip(ops, most, strict=True))


def test_seconds_are_those_of_training() -> None:
    for seed, activation_tokens in itertools.product(range(4), (None, 0)):
        rng = seed_all(seed)
        sequences = branching_sequences(rng, count=90, longest=60)
        masks = [np.arange(len(tokens)) > 0 for tokens in sequences]
        budget = StepBudget(8, None, activation_tokens)
        step = GroupStep(sequences, masks, 4, budget, PipelineShape(cost_model=TOKENS_ONLY))
        rank = rng.integers(0, 8, len(sequences))
        expected = [tokens_of_training(step, rank, group) for group in range(2)]
        plans = [step.plan(rank, group) for group in range(2)]
        assert [step.seconds(plan) for plan in plans] == pytest.approx(expected)
        assert step.slowest(rank) == pytest.approx(max(expected))


def test_a_division_that_does_not_fit_is_never_the_fastest() -> None:
    sequences = branching_sequences(seed_all(0), count=12, longest=60)
    masks = [np.arange(len(tokens)) > 0 for tokens in sequences]
    step = GroupStep(sequences, masks, 2, StepBudget(16, 20), PipelineShape(cost_model=TOKENS_ONLY))
    assert step.slowest(np.arange(12) % 4) == np.inf


def test_the_ranks_predict_a_share_each_and_agree() -> None:
    """As the processes of a job do: each predicts some divisions, and all take the same one."""
    sequences, masks, _ = turns_forest(seed_all(5), 9, 4, 5)
    samples = [TrainingSample(*pair) for pair in zip(sequences, masks, strict=True)]
    shape = PipelineShape(cost_model=TOKENS_ONLY)
    world, barrier = 3, threading.Barrier(3)
    values, gathered, partitions = [None] * world, [0] * world, [None] * world

    def run(rank: int) -> None:
        def gather(value: list[float]) -> list[list[float]]:
            values[rank], gathered[rank] = value, len(value)
            barrier.wait(60)
            return list(values)

        mesh = SimpleNamespace(
            rank=rank, world_size=world, data_size=4, pipeline_size=1, context_size=1, expert_data_ranks=(0, 1)
        )
        mesh.gather_from_all = gather
        engine = SimpleNamespace(
            mesh=mesh, memory=None, has_device_costs=False, cost_model=lambda _: TOKENS_ONLY, pipeline=lambda _: shape
        )
        partitions[rank] = partition_samples(samples, engine, TreeConfig(tree_segment_tokens=64))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(gathered) < sum(gathered)
    step = GroupStep(*trained_parts(samples), 2, StepBudget(64), shape)
    alone = partition_sequences(
        step.sequences, 4, step.masks, TOKENS_ONLY, step_seconds=lambda all_: [step.slowest(ranks) for ranks in all_]
    )
    for partition in partitions:
        assert partition.rank_of_sequence.tolist() == alone.rank_of_sequence.tolist()
