"""Context parallelism in the planner of runs: memory, time, and the meshes that are tried."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import Cluster
from megatron_dta.extras.capacity.memory import InFlight, StateSettings, stage_memory
from megatron_dta.extras.capacity.meshes import MeshSizes, make_mesh, possible_choices
from megatron_dta.extras.capacity.step_time import mesh_costs, stage_time
from megatron_dta.extras.capacity.work import StepWork

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
    hybrid = replace(SMALL, linear_attention_layers=(True, False) * 6)
    assert make_mesh(hybrid, 2, MeshSizes(context=2)).context == 2
    odd = replace(hybrid, linear_num_key_heads=3, linear_num_value_heads=6)
    with pytest.raises(InputError, match="-size 2 does not divide linear_num_key_heads 3; lower it"):
        make_mesh(odd, 2, MeshSizes(context=2))
