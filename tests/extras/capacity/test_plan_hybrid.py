"""Planning a run of a model with gated delta net: its operations, and the states at forks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dta.core.planning.costs.memory_budget import StageBytes
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.planning.costs.state_bytes import StateBytes, StepStates
from megatron_dta.core.planning.segments.runs import SegmentRuns
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import Cluster
from megatron_dta.extras.capacity.meshes import Choice
from megatron_dta.extras.capacity.search import Planner
from megatron_dta.extras.capacity.sequences import made_up_sequences
from megatron_dta.extras.capacity.step_time import mesh_costs, stage_time
from megatron_dta.extras.capacity.work import ReplicaWork, StepWork

SMALL = DecoderShape(12, 512, 1536, 8, 4, 64, 4096, qk_layernorm=True)


def test_a_model_with_gated_delta_net_counts_its_operations_and_states() -> None:
    shape = replace(
        SMALL, linear_attention_layers=(True, True, True, False) * 3, attention_output_gate=True, linear_num_key_heads=8
    )
    cluster = Cluster(num_gpus=2, gpus_per_node=2, short_segment_tokens=0.0)
    sequences, masks = made_up_sequences(40, 6000, 600, 8)
    costs = mesh_costs(shape, RunMesh(1, 1, 1, (12,)), cluster)
    planner = Planner(shape, cluster, StepWork(sequences, masks, costs))
    single, two = RunMesh(1, 1, 2, (12,)), RunMesh(1, 2, 1, (7, 5))
    counts = ReplicaWork(1000, 50_000, 0, 1, 1000, 1000, 1000)
    time = stage_time(shape, single, cluster, counts, 0)
    # The rule is counted by its measured time, beside elementwise work.
    expected = StepCounts(1000, 50_000, 0).flops(shape) - 3 * shape.linear_token_operations * 1000
    without_rule = stage_time(replace(shape, linear_attention_layers=()), single, cluster, counts, 0)
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
