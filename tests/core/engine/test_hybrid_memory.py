"""Counted bytes of hybrid models against the tensors that layers keep, and steps within a limit of memory."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from hybrid_cases import HYBRID, NEMOTRON, NEMOTRON_EXPERTS, spread
from live_bytes import LiveBytes, Scales
from main_grad_cases import DIRECT, Wrapped
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.engine.stage_run import StageRun
from megatron_dta.core.model.build import build_model
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.step.passes import stage_chunks, stage_peak_bytes
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock
from megatron_dta.extras.parity.outcome import Outcome
from tree_engine_cases import GRPO, TEMPERATURE, VOCABULARY, model_config, tree_config, weights_of
from triton_device import interpreter

SFT = make_objective(ObjectiveConfig(objective="sft"))
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
