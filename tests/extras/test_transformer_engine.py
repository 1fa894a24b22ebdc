"""``--transformer-impl transformer_engine`` where Transformer Engine is not installed: the refusal, and the spec."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions import transformer_engine

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.config.checks.transformer_engine import check_fp8, check_fp8_support
from megatron_dta.core.model.build import block_spec, build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.transformer_engine import layers as transformer_engine_layers
from megatron_dta.extras.transformer_engine.layers import TreeTELinear, weights_quantized_once
from tree_engine_cases import QWEN3, model_config

MODEL = model_config(torch.bfloat16, **QWEN3, transformer_impl="transformer_engine")


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_it_is_refused_where_it_is_not_installed():
    with pytest.raises(InputError, match="--transformer-impl transformer_engine: Transformer Engine is not installed"):
        build_model(MODEL, initialize_parallel(1))


def test_what_it_cannot_compute_is_refused():
    with pytest.raises(InputError, match="needs --bf16: it rounds the factors of float32 products to TF32"):
        build_model(replace(MODEL, params_dtype=torch.float32), initialize_parallel(1))
    shape = dict(hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, kv_channels=16, num_query_groups=2)
    with pytest.raises(InputError, match="needs widths in multiples of 128: --hidden-size is 64; give tensorwise"):
        check_fp8(replace(MODEL, **shape, fp8_format="hybrid"), ParallelConfig())
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="--fp8-format e4m3 with --fp8-recipe blockwise needs a CUDA GPU"):
            check_fp8_support(replace(MODEL, fp8_format="e4m3"))


@pytest.mark.parametrize("own_gradients", [False, True], ids=["fused", "autograd"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_linear_layer_is_transformer_engines(monkeypatch, sequence_parallel, own_gradients):
    # Without Transformer Engine, Megatron's classes cannot be built upon.
    for name in ("TEColumnParallelLinear", "TERowParallelLinear"):
        monkeypatch.setattr(transformer_engine, name, type(name, (), {}))
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, no_gradient_accumulation_fusion=own_gradients
    )
    spec = block_spec(MODEL, parallel, range(2))
    assert len(spec.layer_specs) == 2
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        mlp = transformer_engine_layers.feed_forward_submodules(layer.submodules.mlp)
        names = [part.__name__ for part in (attention.linear_qkv, mlp.linear_fc1)]
        assert names == ["TEColumnParallelLinear"] * 2
        names = [part.__name__ for part in (attention.linear_proj, mlp.linear_fc2)]
        assert names == ["TERowParallelLinear"] * 2
        for part in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
            assert issubclass(part, TreeTELinear)
            assert part.into_main_grad != own_gradients


class FakeTELinear(torch.nn.Module):
    """What Megatron's wrapper asks Transformer Engine for: it notes whether a pass is called the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.config = SimpleNamespace(fp8="hybrid")
        self.fuse_wgrad_accumulation = False
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self._fp8_workspaces: dict[str, torch.Tensor] = {}
        self.asked: list[bool | None] = []

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise AssertionError("its own extra state is not used")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        self.asked.append(first)
        if first is not None and not self._fp8_workspaces:
            self._fp8_workspaces["weight"] = self.weight.detach().clone()
        quantized = self._fp8_workspaces["weight"] if first is not None else self.weight
        self.is_first_microbatch = False
        return x @ quantized.t()


def tree_layer(into_main_grad: bool = True) -> FakeTELinear:
    return transformer_engine_layers._for_trees(FakeTELinear, into_main_grad, True)()


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_the_gradient_buffer_decides_on_accumulation(into_main_grad):
    layer = tree_layer(into_main_grad)
    layer(torch.ones(3))
    assert layer.fuse_wgrad_accumulation is False
    layer.weight.main_grad = torch.zeros(2, 3)
    layer(torch.ones(3))
    assert layer.fuse_wgrad_accumulation is into_main_grad


def test_no_pass_is_called_the_first_one():
    """Of the first pass Transformer Engine writes the gradient over the buffer, and here its backward is the last."""
    layer = tree_layer()
    for _ in range(3):
        layer(torch.ones(3))
    with weights_quantized_once([layer]):
        for _ in range(3):
            layer(torch.ones(3))
    assert layer.asked == [None] * 3 + [False] * 3


def test_the_quantized_weight_is_shared_within_a_step_only():
    layer, x = tree_layer(), torch.ones(3)
    outputs = []
    for value in (1.0, 2.0, 5.0):
        with torch.no_grad():
            layer.weight.fill_(value)
            outputs.append(layer(x))
        with weights_quantized_once([layer]):
            with torch.no_grad():
                outputs.append(layer(x))
            # A copy without the transpose is not the one that a pass with gradients finds.
            assert not layer._fp8_workspaces
            outputs += [layer(x), layer(x)]
            assert list(layer._fp8_workspaces) == ["weight"]
            with torch.no_grad():
                outputs.append(layer(x))
            assert layer.asked[-4:] == [None, False, False, False]
        assert not layer._fp8_workspaces
        assert all(torch.equal(output, torch.full((2,), 3 * value)) for output in outputs[-5:])


def test_state_dictionaries_are_those_of_local_layers():
    device = initialize_parallel(1)
    local = build_model(replace(MODEL, transformer_impl="local"), device).decoder.layers[0].mlp.linear_fc1
    layer = tree_layer()
    state = layer.state_dict()
    assert state.keys() == local.state_dict().keys() == {"weight", "_extra_state"}
    assert state["_extra_state"] is local.state_dict()["_extra_state"] is None
    layer.load_state_dict({"weight": torch.zeros(2, 3)})
    layer.load_state_dict({"weight": torch.ones(2, 3), "_extra_state": torch.ones(5, dtype=torch.uint8)})
    assert torch.equal(layer.weight, torch.ones(2, 3))
