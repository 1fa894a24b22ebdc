"""Planning a run: parameters and states are those of the real model, times add up, and what does not fit is refused."""

from dataclasses import replace

import numpy as np
import pytest

from common.benchmark_model import settings_of
from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.simulation import simulate
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape, RankParameters
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.capacity.cluster import PRESETS, Cluster
from megatron_dta.extras.capacity.memory import InFlight, StateSettings, rank_parameters, stage_memory
from megatron_dta.extras.capacity.meshes import Choice, MeshSizes, SearchSpace, make_mesh, possible_choices
from megatron_dta.extras.capacity.search import USABLE, Planner
from megatron_dta.extras.capacity.sequences import made_up_sequences
from megatron_dta.extras.capacity.step_time import mesh_costs, send_seconds, stage_time
from megatron_dta.extras.capacity.work import StepWork
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer

SMALL = DecoderShape(12, 512, 1536, 8, 4, 64, 4096, qk_layernorm=True)
EXPERTS = replace(SMALL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256, moe_layers=(False, True) * 6)


def config_of(shape: DecoderShape, **more: object) -> ModelConfig:
    flags = dict(qk_layernorm=shape.qk_layernorm, add_qkv_bias=shape.add_qkv_bias)
    return ModelConfig(**settings_of(shape) | flags | more)


def small_step(seed: int = 5, num: int = 24) -> StepWork:
    rng = seed_all(seed)
    prompts = [rng.integers(0, 50, rng.integers(40, 90)) for _ in range(4)]
    sequences = [
        np.concatenate([prompts[i % 4], rng.integers(0, 50, rng.integers(30, 300))]).astype(np.int32)
        for i in range(num)
    ]
    masks = [np.arange(len(s)) >= len(prompts[i % 4]) for i, s in enumerate(sequences)]
    single = RunMesh(1, 1, 1, (SMALL.num_layers,))
    return StepWork(sequences, masks, mesh_costs(SMALL, single, Cluster(8)))


def planner(num_gpus: int = 8, shape: DecoderShape = SMALL, **more: object) -> Planner:
    return Planner(shape, Cluster(num_gpus, **more), small_step())


@pytest.mark.parametrize("seed", range(2, 6))
def test_parameters_are_those_of_the_real_model(seed: int) -> None:
    rng = seed_all(seed)
    groups = int(rng.integers(1, 4))
    shape = DecoderShape(
        num_layers=int(rng.integers(1, 4)), hidden_size=8 * int(rng.integers(1, 5)),
        ffn_hidden_size=int(rng.integers(3, 40)), num_attention_heads=groups * int(rng.integers(1, 3)),
        num_query_groups=groups, kv_channels=2 * int(rng.integers(1, 6)), vocab_size=int(rng.integers(11, 60)),
        swiglu=bool(seed % 2), qk_layernorm=bool(rng.integers(2)), add_qkv_bias=bool(rng.integers(2)),
        untie_embeddings_and_output_weights=bool(rng.integers(2)), num_experts=4 if seed >= 3 else None,
        moe_ffn_hidden_size=12 if seed >= 3 else None, moe_shared_expert_intermediate_size=7 if seed == 5 else None,
    )  # fmt: skip
    config = config_of(shape)
    assert DecoderShape.of(config) == shape
    model = build_model(config, initialize_parallel(seed))
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    layer = model.decoder.layers[0]
    matrices = [p for n, p in layer.named_parameters() if p.dim() == 2 and "experts.local_experts" not in n]
    if seed < 3:
        assert shape.token_weights(0) == sum(p.numel() for p in matrices)


@pytest.mark.parametrize("shape", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_ranks_together_hold_the_model(shape: DecoderShape) -> None:
    mesh = make_mesh(shape, 16, MeshSizes(tensor=2, pipeline=4, experts=2 if shape.num_experts else 1, expert_tensor=1))
    total = RankParameters(0)
    for stage in range(4):
        total += rank_parameters(shape, mesh, stage)
    # What a tensor group holds twice: norms, and routers.
    twice = shape.num_layers * (2 * shape.hidden_size + 2 * shape.kv_channels) + shape.hidden_size
    twice += sum(shape.moe_layers) * (shape.num_experts or 0) * shape.hidden_size
    groups = 2 if shape.num_experts else 1
    assert 2 * total.dense - twice + groups * total.experts == shape.num_parameters


def test_states_are_those_of_the_real_optimizer() -> None:
    config = config_of(replace(SMALL, num_layers=2, vocab_size=61, hidden_size=32, moe_layers=()), bf16=True)
    shape = DecoderShape.of(config)
    model = build_model(config, initialize_parallel(3))
    optimizer = TrainingOptimizer(model, OptimizationConfig(), ParallelConfig())
    optimizer.zero_grad()
    sum(p.float().pow(2).sum() for p in model.parameters()).backward()
    optimizer.step(1.0)
    memory = stage_memory(shape, RunMesh(1, 1, 1, (2,)), StateSettings(), 0, InFlight(0, 0, 0))
    assert memory.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert memory.gradients == sum(p.main_grad.numel() * p.main_grad.element_size() for p in model.parameters())
    inner = optimizer.optimizer.chained_optimizers[0].optimizer
    masters = [p for group in inner.param_groups for p in group["params"]]
    states = sum(p.numel() * p.element_size() for p in masters)
    states += sum(t.numel() * t.element_size() for s in inner.state.values() for n, t in s.items() if n != "step")
    assert memory.optimizer == states


def test_states_are_divided_offloaded_and_smaller() -> None:
    mesh, nothing = make_mesh(SMALL, 8, MeshSizes(tensor=2)), InFlight(0, 0, 0)

    def optimizer(**more: object) -> float:
        return stage_memory(SMALL, mesh, StateSettings(**more), 0, nothing).optimizer

    replicated = optimizer(distributed_optimizer=False)
    assert optimizer() == replicated / 4
    assert optimizer(offload_fraction=0.75) == replicated / 16
    assert optimizer(exp_avg="bf16", exp_avg_sq="bf16") == pytest.approx(replicated / 4 * 8 / 12)
    assert optimizer(optimizer=False) == 0
    host = stage_memory(SMALL, mesh, StateSettings(offload_fraction=1.0), 0, nothing).host
    assert host == pytest.approx(replicated / 4 * 16 / 12)
    experts = stage_memory(EXPERTS, make_mesh(EXPERTS, 8, MeshSizes(experts=4)), StateSettings(), 0, nothing)
    held = rank_parameters(EXPERTS, make_mesh(EXPERTS, 8, MeshSizes(experts=4)), 0)
    assert experts.optimizer == pytest.approx(12 * (held.dense / 8 + held.experts / 2))


def step_of_training(plan: Planner, mesh: RunMesh, segment_tokens: int) -> StepPlan:
    """What training would plan for the slowest replica, as its engine says."""
    partition = plan.step.partition(mesh.data)
    numbers = partition.sequences_of(int(partition.cost_per_rank.argmax()))
    samples = [TrainingSample(plan.step.sequences[i], plan.step.masks[i]) for i in numbers]
    shape = PipelineShape(mesh.pipeline, mesh.chunks, mesh.layers, CostModel.from_shape(SMALL))
    return plan_step(samples, "dta", StepBudget(segment_tokens), pipeline=shape)


@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_a_plan_is_that_of_training_and_its_parts_add_up(pipeline: int, chunks: int) -> None:
    plan = planner()
    mesh = make_mesh(SMALL, 8, MeshSizes(pipeline=pipeline, chunks=chunks))
    prediction = plan.simulate(Choice(mesh, 256))
    assert sum(prediction.time.parts().values()) == prediction.time.total
    assert sum(prediction.memory.parts().values()) == prediction.memory.total
    segments, counts = prediction.work.planned
    rank_tokens = plan.step.partition(mesh.data).tokens_per_rank
    assert prediction.work.tokens in rank_tokens
    if pipeline > 1:
        # Segments and schedule are training's, the seconds are the cluster's.
        step = step_of_training(plan, mesh, segment_tokens=256)
        schedule = step.training.schedule
        np.testing.assert_array_equal(step.segments.segment_start, segments.segment_start)
        expected = PipelineCosts.of_segments(
            mesh_costs(SMALL, mesh, plan.cluster, segments.segment_tokens), *counts, mesh.layers
        )
        send = send_seconds(SMALL, mesh, plan.cluster, segments.segment_tokens)
        timeline = simulate(schedule, segments.segment_parent, expected, send)
        assert prediction.utilisation == timeline.utilisation
        # What a stage computes by its parts is what the simulation has it busy for.
        ends = [stage_time(SMALL, mesh, plan.cluster, prediction.work, s).computing for s in range(pipeline)]
        gathered = prediction.work.path_tokens > 0
        assert ends == pytest.approx(timeline.busy, rel=0.05 if gathered else 1e-9)
        assert prediction.time.computing + prediction.time.bubble == pytest.approx(timeline.makespan, rel=0.05)


def test_recomputation_takes_time_and_less_memory() -> None:
    plan = planner()
    mesh = make_mesh(SMALL, 8)
    everything = plan.simulate(Choice(mesh, 128))
    nothing = plan.simulate(Choice(mesh, 128, activation_tokens=0))
    full = plan.simulate(Choice(mesh, 128, full_recompute=True))
    some = plan.simulate(Choice(mesh, 128, activation_tokens=200))
    assert everything.recomputed == 0
    assert full.recomputed == 1
    # Leaves of the segment tree keep their activations for nothing.
    inner = np.isin(np.arange(nothing.work.segments), nothing.work.planned[0].segment_parent)
    lengths = nothing.work.planned[0].lengths
    assert nothing.recomputed == pytest.approx(lengths[inner].sum() / lengths.sum())
    assert 0 < some.recomputed < nothing.recomputed < 1
    assert everything.time.gemm < some.time.gemm < nothing.time.gemm < full.time.gemm
    assert everything.memory.activations > full.memory.activations
    assert everything.memory.activations >= some.memory.activations >= nothing.memory.activations


def test_the_search_finds_what_trying_all_would() -> None:
    plan = planner(4)
    choices = list(possible_choices(SMALL, plan.cluster, SearchSpace((128, 512), recompute=("tree",))))
    best, misses = plan.search(choices, top=len(choices))
    assert not misses
    tried = {}
    for choice in choices:
        prediction = plan.simulate(choice)
        key = choice.mesh.tensor, choice.mesh.context, choice.mesh.pipeline
        tried[key] = min(tried.get(key, np.inf), prediction.time.total)
    by_mesh = {(p.choice.mesh.tensor, p.choice.mesh.context, p.choice.mesh.pipeline): p.time.total for p in best}
    assert by_mesh.keys() == tried.keys()
    assert best[0].time.total <= 1.1 * min(tried.values())
    assert [p.time.total for p in best] == sorted(p.time.total for p in best)


def test_activations_are_kept_as_far_as_they_fit() -> None:
    step = small_step(num=16)
    shape = replace(SMALL, num_layers=48, moe_layers=())
    mesh = make_mesh(shape, 1)
    unlimited = Planner(shape, Cluster(1), step).estimate(Choice(mesh, 1024))
    less = Planner(shape, Cluster(1), step).estimate(Choice(mesh, 1024, activation_tokens=0))
    between = (0.5 * unlimited.memory.total + 0.5 * less.memory.total) / GIB / USABLE
    plan = Planner(shape, Cluster(1, gpu_memory_gib=between), step)
    fitted = plan.fitted(Choice(mesh, 1024))
    assert fitted.misses(between) <= 0
    assert 0 < fitted.choice.activation_tokens < unlimited.work.in_flight_tokens
    more = plan.estimate(replace(fitted.choice, activation_tokens=fitted.choice.activation_tokens + 256))
    assert more.misses(between) > 0


@pytest.mark.parametrize("seed", range(3))
def test_made_up_sequences_have_the_numbers_asked_for(seed: int) -> None:
    rng = seed_all(seed)
    samples = int(rng.integers(1, 5))
    num = samples * int(rng.integers(1, 6)) - int(rng.integers(0, samples))
    longest = int(rng.integers(50, 200))
    groups = -(-num // samples)
    prompt = int(rng.integers(1, 30))
    unique = longest if num == 1 else groups * prompt + (longest - prompt) + (num - 1) * int(rng.integers(1, 20))
    sequences, masks = made_up_sequences(num, unique, longest, samples)
    tree = build_prefix_tree(sequences)
    assert (len(sequences), tree.num_tokens, int(tree.sequence_lengths.max())) == (num, unique, longest)
    assert all(not mask[0] and mask[-1] for mask in masks)


def test_meshes_and_clusters_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="--tensor-model-parallel-size 3"):
        make_mesh(SMALL, 9, MeshSizes(tensor=3))
    with pytest.raises(InputError, match="does not divide --num-gpus 6"):
        make_mesh(SMALL, 6, MeshSizes(tensor=4))
    with pytest.raises(InputError, match="--num-gpus 12 is not a multiple"):
        Cluster(12)
    with pytest.raises(InputError, match="offloaded states are float32"):
        StateSettings(offload_fraction=0.5, exp_avg="bf16")
    with pytest.raises(InputError, match="--gemm-tflops"):
        Cluster(8, gemm_tflops=0.0)
    assert all(Cluster(8, **values).gemm_rate > 0 for values in PRESETS.values())
