"""Plans of runs with experts: bytes and ops are those that training plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.extras.capacity.cluster import Cluster
from megatron_dta.extras.capacity.memory import StateSettings, counted_bytes
from megatron_dta.extras.capacity.meshes import Choice, MeshSizes, make_mesh
from megatron_dta.extras.capacity.search import Planner
from megatron_dta.extras.capacity.work import StepWork
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep
from megatron_dta.extras.expert_parallel.planning.synchronized_plan import RankPlan, synchronized_plan
from tree_engine_cases import branching_sequences

SHAPE = DecoderShape(
    *(4, 64, 96, 4, 2, 16, 100),
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=64,
)


@pytest.mark.parametrize(
    "sizes",
    [MeshSizes(experts=4), MeshSizes(2, experts=4, expert_tensor=1, sequence_parallel=True), MeshSizes(context=2)],
)
def test_bytes_are_those_of_training(sizes):
    mesh = make_mesh(SHAPE, 8, sizes)
    rank = RankTensors(
        tensor_size=mesh.tensor,
        sequence_parallel=mesh.sequence_parallel,
        expert_ranks=mesh.experts,
        context_size=mesh.context,
        expert_tensor_size=mesh.expert_tensor,
    )
    expected = SegmentBytes.of_shape(SHAPE, rank)
    assert counted_bytes(SHAPE, mesh, StateSettings()) == replace(expected, work_fixed=0.0, fixed=0.0)


def test_ops_of_an_expert_group_are_those_of_training():
    sequences = branching_sequences(seed_all(3), count=60, longest=90)
    masks = [np.arange(len(tokens)) > 0 for tokens in sequences]
    step = StepWork(sequences, masks, CostModel.from_shape(SHAPE))
    plan = Planner(SHAPE, Cluster(8, floor_seconds_per_layer=0.0), step)
    mesh = make_mesh(SHAPE, 8, MeshSizes(pipeline=2, experts=4))
    assert mesh.synchronized_replicas == 4
    choice = Choice(mesh, 16)
    prediction = plan.simulate(choice)

    _, budget, shape = plan._cut(choice)
    shape = replace(shape, layers=mesh.layers)
    group = GroupStep(sequences, masks, 4, budget, plan._cut(choice)[2])
    parts = [step.partition(4, group).sequences_of(rank) for rank in range(4)]
    even = step.partition(4)
    assert [part.tolist() for part in parts] != [even.sequences_of(rank).tolist() for rank in range(4)]
    steps = [plan_step([TrainingSample(sequences[i], masks[i]) for i in part], "dta", budget, shape) for part in parts]
    training = synchronized_plan(steps[0], [RankPlan.of(other) for other in steps], 0, shape).training
    stage = zip(training.schedule.ops[0], training.most_tokens[0], strict=True)
    most = sorted(tokens for op, tokens in stage if op.kind is OpKind.FORWARD)
    assert sorted(prediction.work.planned[1][0].tolist()) == most
    assert prediction.work.alone.tokens == max(trained.segments.tree.num_tokens for trained in steps)
    assert prediction.time.experts > 0
    alone = plan.simulate(replace(choice, mesh=make_mesh(SHAPE, 8, MeshSizes(pipeline=2))))
    assert alone.time.experts == 0
