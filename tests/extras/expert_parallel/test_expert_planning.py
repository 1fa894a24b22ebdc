"""Ranks that share experts: partitions, merged segment trees, and plans within a limit of bytes."""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.planning.costs.memory_budget import UNDIVIDED, MemoryBudget, StageBytes
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.planning.costs.state_bytes import StateBytes
from megatron_dta.core.planning.partition.divide import partition_sequences, trained_parts
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.plan import Op, OpKind, depth_first_schedule
from megatron_dta.core.planning.segments.slots import allocate_slots
from megatron_dta.core.planning.step.passes import PipelineShape, RankGroup, StepBudget, stage_peak_bytes
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import (
    MergedSegmentTree,
    SegmentForest,
    build_merged_segment_tree,
)
from megatron_dta.extras.expert_parallel.planning.synchronized_plan import RankPlan, synchronized_plan
from megatron_dta.training.data.division import partition_samples
from merged_segment_tree_cases import path_of, peak_of, random_forest
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
    training = synchronized_plan(plans[0], [RankPlan.of(plan, shape) for plan in plans], 0, shape).training
    ops, most = training.schedule.ops[0], training.most_tokens[0]
    times = {op: 1 if op.kind is OpKind.FORWARD else 2 + (not training.kept[0, op.segment]) for op in ops}
    return sum(tokens * times[op] for op, tokens in zip(ops, most, strict=True))


def test_seconds_are_those_of_training() -> None:
    for seed, activation_tokens in itertools.product(range(4), (None, 0)):
        rng = seed_all(seed)
        sequences = branching_sequences(rng, count=40, longest=60)
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


def check_embedding(forests: list[SegmentForest], tree: MergedSegmentTree, memory_tokens: int) -> None:
    parents = tree.segment_parent.tolist()
    path: list[int] = []
    for node, parent in enumerate(parents):  # preorder: the parent is on the path of the node before
        while path and path[-1] != parent:
            path.pop()
        assert (path[-1] if path else -1) == parent
        path.append(node)
    budget = max([memory_tokens, *map(peak_of, forests)])
    for forest, segment_of in zip(forests, tree.segment_of, strict=True):
        nodes = np.flatnonzero(segment_of >= 0)
        assert sorted(segment_of[nodes].tolist()) == list(range(len(forest.segment_parent)))
        node_of = {int(segment_of[node]): int(node) for node in nodes}
        for segment, parent in enumerate(forest.segment_parent):
            assert parent < 0 or node_of[parent] in path_of(parents, node_of[segment])
        for node in range(tree.num_segments):
            on_path = [segment_of[above] for above in path_of(parents, node) if segment_of[above] >= 0]
            assert sum(forest.lengths[segment] for segment in on_path) <= budget
    assert (tree.segment_of >= 0).any(axis=0).all()
    for node in range(tree.num_segments):
        present = [(f, s[node]) for f, s in zip(forests, tree.segment_of, strict=True) if s[node] >= 0]
        assert tree.lengths[node] == max(f.lengths[s] for f, s in present)
    longest = [sum(int(tree.lengths[above]) for above in path_of(parents, node)) for node in range(len(parents))]
    assert tree.peak_in_flight_tokens == max(longest, default=0)


@pytest.mark.parametrize("seed", range(20))
def test_every_tree_is_embedded(seed: int) -> None:
    generator = seed_all(seed)
    forests = [random_forest(generator, int(generator.integers(0, 25))) for _ in range(generator.integers(1, 5))]
    memory_tokens = int(generator.integers(0, 1500))
    tree = build_merged_segment_tree(forests, memory_tokens)
    check_embedding(forests, tree, memory_tokens)
    sizes = [len(forest.segment_parent) for forest in forests]
    assert max(sizes) <= tree.num_segments <= sum(sizes)
    again = build_merged_segment_tree(forests, memory_tokens)
    assert np.array_equal(again.segment_of, tree.segment_of)
    assert np.array_equal(again.segment_parent, tree.segment_parent)


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_runs_its_own_tree_in_a_right_order(seed: int) -> None:
    generator = seed_all(100 + seed)
    forests = [random_forest(generator, int(generator.integers(0, 30))) for _ in range(3)]
    tree = build_merged_segment_tree(forests, 600)
    ops = depth_first_schedule(tree)
    for forest, segment_of in zip(forests, tree.segment_of, strict=True):
        rank_ops = [Op(op.kind, int(segment_of[op.segment])) for op in ops if segment_of[op.segment] >= 0]
        alone = MergedSegmentTree(
            np.asarray(forest.segment_parent, dtype=np.int32),
            np.arange(len(forest.lengths), dtype=np.int32)[None],
            np.asarray(forest.lengths, dtype=np.int64),
        )
        _, num_slots = allocate_slots(alone, rank_ops)  # refuses a wrong order
        assert len(rank_ops) == 2 * len(forest.lengths)
        assert num_slots >= peak_of(forest)


def test_segments_of_equal_time_run_together() -> None:
    shorter = 0
    for seed in range(20):
        generator = seed_all(300 + seed)
        forests = [random_forest(generator, 20) for _ in range(2)]
        times = [generator.integers(1, 1000, 20).tolist() for _ in forests]
        trees = [build_merged_segment_tree(forests, 600, given) for given in (times, None)]
        check_embedding(forests, trees[0], 600)
        # As the planner weighs them: an op has a fixed cost, too.
        fixed = [sum(of_rank) // 160 + 1 for of_rank in times]
        costs = [[time + more for time in of_rank] for of_rank, more in zip(times, fixed, strict=True)]
        by_time, by_tokens = (int(tree.largest(costs).sum()) for tree in trees)
        assert by_time <= by_tokens
        shorter += by_time < by_tokens
    assert shorter > 10


def test_equal_trees_cost_nothing_more() -> None:
    forest = random_forest(seed_all(200), 40)
    tree = build_merged_segment_tree([forest] * 4)
    assert tree.num_segments == 40
    assert tree.lengths.sum() == sum(forest.lengths)


def test_idle_ranks_and_no_ranks_with_segments() -> None:
    forest, none = random_forest(seed_all(1), 9), SegmentForest([], [])
    assert build_merged_segment_tree([none, forest, none]).num_segments == 9
    assert build_merged_segment_tree([none, none]).num_segments == 0


SHAPE = DecoderShape(4, 64, 96, 4, 2, 16, 100, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48)
BYTES = replace(SegmentBytes.of_shape(SHAPE, RankTensors(logit_rows=16, expert_ranks=2)), fixed=0.0)
RANKS = 2
# Per virtual stage the same: what a stage with gated delta net keeps beside its segments.
STATES = StateBytes(open_fork=6000.0, exit=2000.0, state=500.0)
ONE_STAGE = PipelineShape(layers=(4,))
PIPELINES = {"pp2": PipelineShape(2, layers=(3, 1)), "pp2, virtual": PipelineShape(2, 2, layers=(1,) * 4)}


class Gather:
    """Lets threads exchange objects as ranks would."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(RANKS), [None] * RANKS

    def __call__(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(60)
        gathered = list(self.values)
        self.barrier.wait(60)
        return gathered


def plans(
    mib: float, budget: StepBudget, stages: PipelineShape = ONE_STAGE, states: StateBytes | None = None
) -> list[StepPlan | InputError]:
    """The plans of all ranks; the second one has a third of the sequences."""
    num_sequences = 12
    sequences = branching_sequences(seed_all(3), count=num_sequences, longest=60)
    samples = [
        TrainingSample(tokens, np.ones(len(tokens), bool) & (np.arange(len(tokens)) > 0)) for tokens in sequences
    ]
    parts = samples[: 2 * len(samples) // 3], samples[2 * len(samples) // 3 :]
    memory = memory_of(mib, stages, states)
    shape = replace(stages, cost_model=CostModel.from_shape(SHAPE), memory=memory, is_measured=True)
    return planned_together(parts, budget, shape)


def planned_together(
    parts: Sequence[list[TrainingSample]], budget: StepBudget, shape: PipelineShape
) -> list[StepPlan | InputError]:
    """The plans of ranks that share experts."""
    gather, planned = Gather(), {}

    def plan(rank: int) -> None:
        group = RankGroup(rank, lambda value: gather(rank, value))
        try:
            planned[rank] = plan_step(parts[rank], "dta", budget, replace(shape, group=group))
        except InputError as error:
            planned[rank] = error
            gather.barrier.abort()
        except threading.BrokenBarrierError:
            planned[rank] = InputError("another rank found no plan")

    threads = [threading.Thread(target=plan, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [planned[rank] for rank in range(RANKS)]


def kept_of_ops(step: StepPlan) -> list[tuple[OpKind, bool]]:
    return [(op.kind, bool(step.training.kept[0, op.segment])) for op in step.training.schedule.ops[0]]


@pytest.mark.parametrize(("mib", "keeps"), [(1024.0, "all"), (0.5, "some")])
def test_ranks_keep_the_same_ops(mib, keeps):
    steps = plans(mib, StepBudget(segment_tokens=8))
    assert kept_of_ops(steps[0]) == kept_of_ops(steps[1])
    assert steps[0].training.most_tokens == steps[1].training.most_tokens
    backwards = [is_kept for kind, is_kept in kept_of_ops(steps[0]) if kind is OpKind.BACKWARD]
    assert all(backwards) == (keeps == "all")
    assert any(backwards)


def memory_of(mib: float, stages: PipelineShape, states: StateBytes | None) -> MemoryBudget:
    """The last virtual stage has attention only."""
    of_stages = [StageBytes(BYTES, states)] * len(stages.layers)
    if len(of_stages) > 1:
        of_stages[-1] = StageBytes(BYTES)
    return MemoryBudget(mib / 1024, (0.0,) * stages.num_stages, tuple(of_stages))


def peaks(steps: list[StepPlan], pipeline: PipelineShape, states: StateBytes | None = None) -> list[float]:
    """Peak bytes of each rank and stage, from the tokens of its own segments."""
    shape = replace(pipeline, memory=memory_of(1.0, pipeline, states))
    stages = range(pipeline.num_stages)
    return [stage_peak_bytes(step.segments, step.training, shape, stage) for step in steps for stage in stages]


@pytest.mark.parametrize("states", [None, STATES], ids=["attention", "states"])
def test_ranks_of_one_stage_keep_within_the_limit(states):
    budget = StepBudget(segment_tokens=8)
    everything = max(peaks(plans(1024.0, budget, states=states), ONE_STAGE, states))
    forms = set()
    for share in (1.2, 0.9, 0.7, 0.5, 0.35):
        steps = plans(share * everything / (1 - UNDIVIDED) / 2**20, budget, states=states)
        if any(isinstance(step, InputError) for step in steps):
            assert share < 0.6
            continue
        assert max(peaks(steps, ONE_STAGE, states)) <= share * everything
        forms.add(bool(steps[0].training.kept.all()))
    assert forms == {True, False}


@pytest.mark.parametrize("states", [None, STATES], ids=["attention", "states"])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_that_share_experts_keep_within_the_limit(name, states):
    pipeline, budget = PIPELINES[name], StepBudget(segment_tokens=8)
    unlimited = plans(1024.0, budget, pipeline, states)
    everything = max(peaks(unlimited, pipeline, states))
    for share in (0.9, 0.7):
        limit = share * everything / (1 - UNDIVIDED) / 2**20
        steps = plans(limit, budget, pipeline, states)
        assert max(peaks(steps, pipeline, states)) <= share * everything
        schedules = [
            [[(op.kind, op.chunk, bool(step.training.kept[0, op.segment])) for op in ops] for ops in stages]
            for step, stages in ((step, step.training.schedule.ops) for step in steps)
        ]
        assert schedules[0] == schedules[1]
        errors = plans(0.1, budget, pipeline, states)
    assert all(isinstance(error, InputError) and "too small on pipeline rank" in str(error) for error in errors)
