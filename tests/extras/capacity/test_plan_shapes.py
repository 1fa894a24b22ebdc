"""Planning runs with context parallelism, gated delta net and experts: memory, operations and meshes."""

from dataclasses import replace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.memory_budget import StageBytes
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.planning.costs.state_bytes import StateBytes, StepStates
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.segments.runs import SegmentRuns
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import Cluster
from megatron_dta.extras.capacity.memory import InFlight, StateSettings, counted_bytes, stage_memory
from megatron_dta.extras.capacity.meshes import Choice, MeshSizes, make_mesh, possible_choices
from megatron_dta.extras.capacity.search import Planner
from megatron_dta.extras.capacity.sequences import made_up_sequences
from megatron_dta.extras.capacity.step_time import mesh_costs, stage_time
from megatron_dta.extras.capacity.work import ReplicaWork, StepWork
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep
from megatron_dta.extras.expert_parallel.planning.synchronized_plan import RankPlan, synchronized_plan
from megatron_dta.families.gated_delta_net.sizes import Sizes
from tree_engine_cases import branching_sequences

SMALL = DecoderShape(12, 512, 1536, 8, 4, 64, 4096, qk_layernorm=True)


def test_context_ranks_share_tokens_and_heads() -> None:
    cluster, flight = Cluster(4), InFlight(3000, 512, 1500)
    sequences = [seed_all(seed).integers(0, 50, 300).astype(np.int32) for seed in range(4)]
    masks = [np.arange(300) > 20] * 4
    step = StepWork(sequences, masks, mesh_costs(SMALL, RunMesh(1, 1, 1, (12,)), cluster))
    meshes = [make_mesh(SMALL, 4, MeshSizes(context=context)) for context in (1, 2, 4)]
    assert [(mesh.data, mesh.copies, mesh.world_size) for mesh in meshes] == [(4, 4, 4), (2, 4, 4), (1, 4, 4)]
    alone, two, _ = (stage_memory(SMALL, mesh, StateSettings(), 0, flight) for mesh in meshes)
    assert two.keys_values == pytest.approx(alone.keys_values / 2)
    assert (two.weights, two.gradients, two.optimizer) == (alone.weights, alone.gradients, alone.optimizer)
    work = step.estimate(1, StepBudget(512), PipelineShape())
    first, second, _ = (stage_time(SMALL, mesh, cluster, work, 0) for mesh in meshes)
    assert second.attention == pytest.approx(first.attention / 2)
    assert second.tensor > first.tensor == 0
    sizes = {choice.mesh.context: choice.segment_tokens for choice in possible_choices(SMALL, cluster)}
    assert sizes == {1: 8192, 2: 16384, 4: 32768}
    shared = stage_memory(SMALL, make_mesh(SMALL, 8, MeshSizes(context=8)), StateSettings(), 0, flight)
    assert shared.keys_values == pytest.approx(alone.keys_values / 4)  # four key/value heads
    offloaded = stage_memory(SMALL, meshes[1], StateSettings(kv_offload_fraction=0.5), 0, flight)
    # Six layers and two buffers of twelve are left on the device.
    gathered = flight.tokens * 2 * 2 * 2 * 64
    assert offloaded.keys_values == pytest.approx(gathered + (two.keys_values - gathered) * 8 / 12)
    assert offloaded.host == pytest.approx((two.keys_values - gathered) * 6 / 12)
    with pytest.raises(InputError, match="--context-parallel-size 16 x --tensor-model-parallel-size 1 does not divide"):
        make_mesh(SMALL, 16, MeshSizes(context=16))
    hybrid = replace(SMALL, mixer=Sizes(), mixer_layers=(True, False) * 6)
    assert make_mesh(hybrid, 2, MeshSizes(context=2)).context == 2
    odd = replace(hybrid, mixer=Sizes(linear_num_key_heads=3, linear_num_value_heads=6))
    with pytest.raises(InputError, match="-size 2 does not divide linear_num_key_heads 3; lower it"):
        make_mesh(odd, 2, MeshSizes(context=2))


def test_a_model_with_gated_delta_net_counts_its_operations_and_states() -> None:
    shape = replace(
        SMALL,
        mixer=Sizes(linear_num_key_heads=8),
        mixer_layers=(True, True, True, False) * 3,
        attention_output_gate=True,
    )
    cluster = Cluster(num_gpus=2, gpus_per_node=2, short_segment_tokens=0.0)
    sequences, masks = made_up_sequences(40, 6000, 600, 8)
    costs = mesh_costs(shape, RunMesh(1, 1, 1, (12,)), cluster)
    planner = Planner(shape, cluster, StepWork(sequences, masks, costs))
    single, two = RunMesh(1, 1, 2, (12,)), RunMesh(1, 2, 1, (7, 5))
    counts = ReplicaWork(1000, 50_000, 0, 1, 1000, 1000, 1000)
    time = stage_time(shape, single, cluster, counts, 0)
    # The rule is counted by its measured time, beside elementwise work.
    expected = StepCounts(1000, 50_000, 0).flops(shape) - 3 * shape.recurrent_operations * 1000
    without_rule = stage_time(replace(shape, mixer=None, mixer_layers=()), single, cluster, counts, 0)
    assert time.elementwise > without_rule.elementwise
    attention = 12.0 * 3 * shape.query_width * 50_000
    assert time.gemm * cluster.gemm_rate + attention == pytest.approx(expected)
    # Two stages share the work: 6 and 3 layers with states.
    stages = [stage_time(shape, two, cluster, counts, stage) for stage in (0, 1)]
    assert sum(stage_seconds.gemm for stage_seconds in stages) == pytest.approx(time.gemm)
    assert sum(stage_seconds.attention for stage_seconds in stages) == pytest.approx(time.attention)
    # Bytes as training counts them, with the states of the plan's open forks.
    assert planner._bytes(Choice(single, 256)) == replace(
        SegmentBytes.of_shape(shape, RankTensors(2)), work_fixed=0.0, fixed=0.0
    )
    planned = planner.simulate(Choice(single, 256))
    segments = planned.work.planned[0]
    runs = SegmentRuns.of(segments)
    states = StepStates.of([runs.counts], StateBytes.of_shape(shape, 2), int(runs.forks_in_flight.max()))
    assert states.in_flight > 0
    without = Planner(shape, cluster, planner.step)
    without._stage_bytes = lambda *arguments: StageBytes(planner._stage_bytes(*arguments).segments)
    added = planned.memory.total - without.simulate(Choice(single, 256)).memory.total
    assert states.in_flight <= added <= states.in_flight + states.kept.sum() + states.work.max()
    assert planner.simulate(Choice(two, 256)).memory.total < planned.memory.total


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
    training = synchronized_plan(steps[0], [RankPlan.of(other, shape) for other in steps], 0, shape).training
    stage = zip(training.schedule.ops[0], training.most_tokens[0], strict=True)
    most = sorted(tokens for op, tokens in stage if op.kind is OpKind.FORWARD)
    assert sorted(prediction.work.planned[1][0].tolist()) == most
    assert prediction.work.alone.tokens == max(trained.segments.tree.num_tokens for trained in steps)
    assert prediction.time.experts > 0
    alone = plan.simulate(replace(choice, mesh=make_mesh(SHAPE, 8, MeshSizes(pipeline=2))))
    assert alone.time.experts == 0
