"""Counted bytes of a segment against the tensors that there really are, one by one, while the fused layers run.

The interpreter runs the same kernels as a GPU on the same tensors; every storage that an op makes is followed from its
birth to its end (``live_bytes``).
"""

import gc
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.layers import qkv_rope, rms_norm
from fused_layers_cases import fused
from live_bytes import LiveBytes, Scales
from main_grad_cases import DIRECT, Wrapped
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.engine.stage_run import StageRun
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.costs import segment_bytes
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.families.latent_attention.sizes import Sizes
from mesh_worker import run_on_ranks
from tree_engine_cases import LLAMA, QWEN3, TEMPERATURE, VOCABULARY, weights_of
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
    monkeypatch.setattr(rms_norm, "_MAX_PROGRAMS", 1)
    monkeypatch.setattr(qkv_rope, "_MAX_PROGRAMS", 1)
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
        mock.patch.object(rms_norm, "_MAX_PROGRAMS", 1),
        mock.patch.object(qkv_rope, "_MAX_PROGRAMS", 1),
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
