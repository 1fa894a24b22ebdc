"""Counted bytes of a segment against the tensors that there really are, one by one, while the fused layers run.

The interpreter runs the same kernels as a GPU on the same tensors; every storage that an op makes is followed from its
birth to its end (``live_bytes``).
"""

import gc
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("triton")

from dataclasses import replace

import torch

from conftest import seed_all
from dta_kernels.layers import qkv_rope, rms_norm
from fused_layers_cases import fused
from hybrid_cases import HYBRID, NEMOTRON, NEMOTRON_EXPERTS, spread
from live_bytes import LiveBytes, Scales
from main_grad_cases import DIRECT, Wrapped
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.engine.stage_run import StageRun
from megatron_dta.core.model.build import build_model
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.costs import segment_bytes
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.step.passes import stage_chunks, stage_peak_bytes
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock
from megatron_dta.extras.parity.outcome import Outcome
from megatron_dta.families.latent_attention.sizes import Sizes
from mesh_worker import run_on_ranks
from tree_engine_cases import GRPO, LLAMA, QWEN3, TEMPERATURE, VOCABULARY, model_config, tree_config, weights_of
from triton_device import interpreter

SFT = make_objective(ObjectiveConfig(objective="sft"))
EXPERTS = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
MIXED = {"moe_layer_freq": [0, 1]}
SHARED = {"moe_shared_expert_intermediate_size": 32}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERT_MESHES = {
    "ep2 over tp2, shared": ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=1, **TP),
    "etp2": ParallelConfig(**TP),
}
HEADS = Sizes(num_heads=4, q_lora_rank=24, kv_lora_rank=20, qk_head_dim=12, qk_pos_emb_head_dim=4, v_head_dim=8)
LATENT = dict(mixer=HEADS, num_query_groups=4, untie_embeddings_and_output_weights=True)
SHAPE = dict(hidden_size=48, ffn_hidden_size=128, num_attention_heads=4, kv_channels=16, num_layers=2)


def samples_of(generator: np.random.Generator) -> list[TrainingSample]:
    trunk, samples = generator.integers(0, VOCABULARY, 24), []
    for length in (16, 19):
        tokens = np.append(trunk, generator.integers(0, VOCABULARY, length)).astype(np.int32)
        mask = generator.random(len(tokens)) < 0.5
        mask[0], mask[-1] = False, True
        samples.append(TrainingSample(tokens, mask))
    return samples


@interpreter
@pytest.mark.parametrize(
    ("settings", "activation_tokens"),
    [(QWEN3, 0), (LLAMA, None), (QWEN3 | EXPERTS | MIXED, 0), (LATENT, None), (LATENT | EXPERTS | SHARED | MIXED, 0)],
)
def test_no_op_holds_more_than_is_counted(settings, activation_tokens, monkeypatch):
    # Sums of weights' gradients, of which there are few beside the tokens of training, are in what is fixed.
    monkeypatch.setattr(rms_norm, "_MAX_PROGRAMS", 3)
    monkeypatch.setattr(qkv_rope, "_MAX_PROGRAMS", 3)
    # Tiles of float32.
    monkeypatch.setattr(segment_bytes, "TILE_TOKENS", 16)
    monkeypatch.setattr(segment_bytes, "TILE_KEYS", 32)
    model = fused(**settings, **SHAPE)
    used = check_ops(model, weights_of(model, seed=3), DIRECT, activation_tokens)
    print("parts of the counted room that backwards took:", used)
    # Gradients of experts are counted as if all were there at once.
    assert max(used) > (0.2 if {"num_experts", "mixer"} & settings.keys() else 0.5)


@interpreter
@pytest.mark.parametrize(
    "settings", [QWEN3, QWEN3 | EXPERTS | {"num_query_groups": 1}], ids=["function", "modules and a shared head"]
)
def test_no_op_of_a_context_rank_holds_more_than_is_counted(settings, tmp_path):
    model = fused(**settings, **SHAPE)
    parallel = ParallelConfig(context_parallel_size=2)
    used = run_on_ranks(_check_rank, (model, weights_of(model, seed=3), parallel), 2, tmp_path)
    assert min(map(max, used)) > (0.2 if "num_experts" in settings else 0.5)


@interpreter
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_no_op_of_an_expert_rank_holds_more_than_is_counted(mesh, tmp_path):
    settings = QWEN3 | EXPERTS | (SHARED if "shared" in mesh else {})
    used = run_on_ranks(_check_rank, (fused(**settings, **SHAPE), {}, EXPERT_MESHES[mesh]), 2, tmp_path)
    print("parts of the counted room that backwards took:", used)
    assert min(map(max, used)) > 0.2


def _check_rank(rank: int, argument: tuple) -> list[float]:
    *argument, parallel = argument
    with (
        mock.patch.object(rms_norm, "_MAX_PROGRAMS", 3),
        mock.patch.object(qkv_rope, "_MAX_PROGRAMS", 3),
        mock.patch.object(segment_bytes, "TILE_TOKENS", 16),
        mock.patch.object(segment_bytes, "TILE_KEYS", 32),
        # Few rows have room for the largest possible number of them in all layers: all experts of all tokens.
        mock.patch.object(segment_bytes, "EXPERT_SHARE", 1 + SHAPE["num_layers"] ** 0.5),
    ):
        # With 0 leaves are kept, the others are not.
        return check_ops(*argument, parallel, None if argument[0].num_experts else 0)


def check_ops(
    model: ModelConfig, weights: dict, parallel: ParallelConfig, activation_tokens: int | None
) -> list[float]:
    """Check what every op holds; returns the parts of the counted room that backwards took."""
    wrapped = Wrapped(model, weights, parallel)
    engine = TreeEngine(wrapped.optimizer.chunks, TEMPERATURE, 16, tree_attention_impl="triton")
    sizes, layers = engine.counted_bytes(), SHAPE["num_layers"]
    tree = TreeConfig(tree_mode="dta", tree_segment_tokens=24, tree_activation_tokens=activation_tokens)
    samples = samples_of(seed_all(61))
    # A first step makes the tables and sums that stay from step to step.
    short = [TrainingSample(samples[0].token_ids[:4], np.arange(4) > 0)]
    engine.forward_backward(prepare_batch(short, tree, pipeline=engine.pipeline(24)), SFT)
    batch = prepare_batch(samples, tree, pipeline=engine.pipeline(24))
    run, mode = StageRun(engine, batch, SFT), LiveBytes()
    run.clock = Scales(mode)
    gc.freeze()  # collections then look only at what the ops make
    with mode:
        run.walk()
    segments, kept = batch.plan.segments, batch.plan.training.kept[0]
    assert segments.num_segments > 2
    assert kept.all() == (activation_tokens is None)
    used = []
    ranks = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    for segment, (tokens, path) in enumerate(zip(segments.lengths, segments.in_flight_tokens, strict=True)):
        tokens = -(-tokens // ranks) * ranks  # with padding
        forward, backward = (run.clock.ops[kind, segment] for kind in (OpKind.FORWARD, OpKind.BACKWARD))
        # Gathered keys are the pool's; the attention's blocks, and positions of those in flight, are in what is fixed.
        # The output is dropped right behind the op.
        once = sizes.kv_per_token * segments.peak_in_flight_tokens + 4096
        once += (4 * SHAPE["kv_channels"] + sizes.input_per_token) * tokens
        activations = sizes.kept(layers) * tokens
        working = float(sizes.work(tokens, path))
        assert forward.filled <= kept[segment] * activations + 64 * path + once
        assert forward.peak <= activations + working + once
        built = 0.0 if kept[segment] else activations
        assert backward.peak <= built + working
        used.append((backward.peak - built) / working)
        if kept[segment]:
            print(f"{forward.filled / activations:.3f} of what is counted as kept")
            assert forward.filled >= 0.94 * activations
    return used


SIZES = dict(hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, kv_channels=16, max_position_embeddings=512)


def test_a_comb_of_many_forks_within_a_limit_has_the_same_gradients() -> None:
    """A path that forks behind every second token: less memory recomputes more, or holds fewer forks, or is refused."""
    spine = np.arange(40, dtype=np.int32) % VOCABULARY
    sequences = [np.append(spine[: 2 * tooth], [1, 2, tooth % 3]).astype(np.int32) for tooth in range(1, 20)] + [spine]
    samples = random_training_samples(sequences, seed=2)
    model = model_config(**HYBRID)
    weights = spread(weights_of(model, seed=3), seed=1)
    expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    built = build_model(model, torch.device("cpu"))
    built.load_state_dict(weights)
    engine, recomputed = TreeEngine(built, TEMPERATURE, 5), []
    tree = replace(tree_config("dta", 8), tree_memory_gib=1.0)
    for mib in (0.8, 64.0):
        engine.limit_memory(mib / 1024, 0.0)
        batch = prepare_batch(samples, tree, pipeline=engine.pipeline(8))
        shape, pools = engine.pipeline(8), StageRun(engine, batch, GRPO).states[0].pool
        (chunk,) = stage_chunks(batch.plan.segments, batch.plan.training, shape, 0)
        held = (pools.states, pools.rows, pools.grad_states, pools.grad_rows)
        assert sum(tensor.nbytes for tensor in held) == chunk.states.in_flight > 0
        assert stage_peak_bytes(batch.plan.segments, batch.plan.training, shape, 0) <= mib * 2**20
        built.zero_grad()
        logprobs, result = engine.compute_logprobs(batch), engine.forward_backward(batch, GRPO)
        gradients = {name: parameter.grad for name, parameter in built.named_parameters()}
        errors = compare_outcomes(Outcome(float(result.loss), logprobs, gradients), expected)
        assert errors.largest() < 1e-12, errors
        recomputed.append(result.recomputed_tokens)
    print("recomputed tokens:", recomputed)
    assert recomputed[0] > recomputed[-1] == 0
    engine.limit_memory(0.2 / 1024, 0.0)
    with pytest.raises(InputError, match=r"--tree-memory-gib .* too small"):
        prepare_batch(samples, tree, pipeline=engine.pipeline(8))


@interpreter
@pytest.mark.parametrize("layers", ["EM*-ME", "[1,0]"])
def test_no_layer_keeps_more_than_is_counted(layers: str) -> None:
    mixer = replace(HYBRID["mixer"], linear_key_head_dim=16, linear_value_head_dim=16)
    settings = HYBRID | SIZES | dict(num_layers=2, mixer_layer_freq=layers, mixer=mixer)
    if "M" in layers:
        mixer = replace(NEMOTRON["mixer"], mamba_head_dim=8, mamba_state_dim=16)
        settings = NEMOTRON_EXPERTS | SIZES | dict(moe_ffn_hidden_size=48, moe_shared_expert_intermediate_size=64)
        settings |= dict(num_layers=len(layers), hybrid_layer_pattern=layers, mixer=mixer)
    model, tokens = model_config(torch.float32, **settings, fused_layer_impl="triton"), 256
    wrapped = Wrapped(model, weights_of(model, seed=3), DIRECT)
    engine, rng, tree = TreeEngine(wrapped.optimizer.chunks, TEMPERATURE, 16), seed_all(4), tree_config("dta", tokens)
    sample = TrainingSample(rng.integers(0, VOCABULARY, tokens).astype(np.int32), np.arange(tokens) > tokens - 3)
    # A first step makes the tables that stay from step to step.
    short = TrainingSample(sample.token_ids[:4], np.arange(4) > 0)
    engine.forward_backward(prepare_batch([short], tree, pipeline=engine.pipeline(tokens)), SFT)
    run, mode = StageRun(engine, prepare_batch([sample], tree, pipeline=engine.pipeline(tokens)), SFT), LiveBytes()
    run.clock = Scales(mode)
    gc.freeze()  # collections then look only at what the ops make
    with mode:
        run.walk()
    forward, sizes = run.clock.ops[OpKind.FORWARD, 0], engine.counted_bytes()
    kept = forward.filled / (sizes.kept(model.num_layers) * tokens)
    print(f"{kept:.3f} of what is counted as kept")
    assert 0.92 <= kept <= 1
