"""Plans of ranks that share experts within a limit of bytes: equal ops, sizes and kept activations on all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.memory_budget import UNDIVIDED, MemoryBudget, StageBytes
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.planning.costs.state_bytes import StateBytes
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.step.passes import PipelineShape, RankGroup, StepBudget, stage_peak_bytes
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from tree_engine_cases import branching_sequences

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
