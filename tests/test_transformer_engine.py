"""``--transformer-impl transformer_engine`` where Transformer Engine is not installed: the refusal, and the spec."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from megatron.core.extensions import transformer_engine

from megatron_dta.arguments import parse_arguments
from megatron_dta.config import ParallelConfig
from megatron_dta.errors import InputError
from megatron_dta.model import build_model, initialize_parallel, transformer_engine_layers
from megatron_dta.model.provider import block_spec
from test_tree_engine import QWEN3, model_config

MODEL = model_config(torch.float32, **QWEN3, transformer_impl="transformer_engine")


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_it_is_refused_where_it_is_not_installed():
    with pytest.raises(InputError, match="--transformer-impl transformer_engine: Transformer Engine is not installed"):
        build_model(MODEL, initialize_parallel(1))


def test_experts_are_refused():
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --task arithmetic --num-experts 4"
    with pytest.raises(InputError, match="--transformer-impl transformer_engine has no experts here"):
        parse_arguments([*line.split(), "--transformer-impl", "transformer_engine"])


@pytest.mark.parametrize("own_gradients", [False, True], ids=["fused", "autograd"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_linear_layer_is_transformer_engines(monkeypatch, sequence_parallel, own_gradients):
    # Without Transformer Engine, Megatron's classes cannot be built upon.
    for name in ("TEColumnParallelLinear", "TERowParallelLinear"):
        monkeypatch.setattr(transformer_engine, name, type(name, (), {}))
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        no_gradient_accumulation_fusion=own_gradients,
    )
    spec = block_spec(MODEL, parallel, range(2))
    assert len(spec.layer_specs) == 2
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        mlp = transformer_engine_layers._feed_forward_submodules(layer.submodules.mlp)
        names = [part.__name__ for part in (attention.linear_qkv, mlp.linear_fc1)]
        assert names == ["TEColumnParallelLinear"] * 2
        names = [part.__name__ for part in (attention.linear_proj, mlp.linear_fc2)]
        assert names == ["TERowParallelLinear"] * 2
        # Turned off, the layers are Transformer Engine's as they are.
        assert (mlp.linear_fc1 is transformer_engine.TEColumnParallelLinear) == own_gradients


def test_the_gradient_buffer_decides_on_accumulation():
    class Layer:
        def __init__(self) -> None:
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> bool:
            return self.fuse_wgrad_accumulation

    layer = transformer_engine_layers._into_main_grad(Layer)()
    assert layer.forward(torch.ones(2)) is False
    layer.weight.main_grad = torch.zeros(2)
    assert layer.forward(torch.ones(2)) is True
