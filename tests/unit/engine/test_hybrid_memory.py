"""Counted bytes of layers with gated delta net in plain PyTorch, against the tensors that there really are."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from conftest import seed_all
from hybrid_cases import HYBRID
from live_bytes import LiveBytes, Scales
from main_grad_cases import DIRECT, Wrapped
from megatron_dta.config import ObjectiveConfig
from megatron_dta.engine import TreeEngine, prepare_batch
from megatron_dta.engine.stage_run import StageRun
from megatron_dta.objectives import make_objective
from megatron_dta.planning.segments.schedule import OpKind
from megatron_dta.planning.step.sample import TrainingSample
from tree_engine_cases import TEMPERATURE, VOCABULARY, model_config, tree_config, weights_of

SFT = make_objective(ObjectiveConfig(objective="sft"))
SIZES = dict(
    hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, kv_channels=16, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, max_position_embeddings=512,
)  # fmt: skip


@pytest.mark.parametrize("layers", ["[1,0]", "[0,0,1]"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, dict(linear_num_value_heads=8), dict(linear_key_head_dim=48, kv_channels=24)])
def test_no_op_holds_more_than_is_counted(layers: str, dtype: torch.dtype, more: dict[str, int]) -> None:
    settings = HYBRID | SIZES | more | dict(num_layers=layers.count(",") + 1, linear_attention_freq=layers)
    model, tokens = model_config(dtype, **settings), 256
    wrapped = Wrapped(model, weights_of(model, seed=3), DIRECT)
    engine, rng, tree = TreeEngine(wrapped.optimizer.chunks, TEMPERATURE, 16), seed_all(4), tree_config("dta", tokens)
    sample = TrainingSample(rng.integers(0, VOCABULARY, tokens).astype(np.int32), np.arange(tokens) > tokens - 3)
    # What stays for ever is made: tables.
    short = TrainingSample(sample.token_ids[:4], np.arange(4) > 0)
    engine.forward_backward(prepare_batch([short], tree, pipeline=engine.pipeline(tokens)), SFT)
    run, mode = StageRun(engine, prepare_batch([sample], tree, pipeline=engine.pipeline(tokens)), SFT), LiveBytes()
    run.clock = Scales(mode)
    gc.freeze()  # collections then look only at what the ops make
    with mode:
        run.walk()
    forward, backward = (run.clock.ops[kind, 0] for kind in (OpKind.FORWARD, OpKind.BACKWARD))
    each = engine.counted_bytes()
    activations, room = each.kept(model.num_layers) * tokens, float(each.work(tokens, tokens))
    parts = forward.filled / activations, forward.peak / (activations + room), backward.peak / room
    print("parts of what is counted: kept, most in the forward, most in the backward:", parts)
    assert 0.93 <= parts[0] <= 1
    assert max(parts[1:]) <= 1
