"""Decoding passes without modules equal the modules bit for bit, and leave other passes to them."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decode_layer_cases import MODELS, few_parts, fused_model, passes  # noqa: F401 (a fixture)
from dta_kernels.layers.few_rows import Tiles
from megatron_dta.core.model.decode import decode_layer
from megatron_dta.core.model.layers.fused_layer import FusedLayer
from triton_device import interpreter

pytestmark = interpreter


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_the_modules_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch):
    model = fused_model(name)
    direct, contexts = passes(model)
    assert all(context.direct_until == model.layer_numbers[-1] and context.carried is None for context in contexts)
    monkeypatch.setattr(FusedLayer, "decodes_directly", False)
    modules, contexts = passes(model)
    assert all(context.direct_until is None for context in contexts)
    for hidden, expected in zip(direct, modules, strict=True):
        assert torch.isfinite(hidden).all()
        assert torch.equal(hidden, expected)


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_products_in_terms_give_the_modules_numbers(qkv_bias: bool, monkeypatch: pytest.MonkeyPatch):
    """The products of a GPU; one with a bias, and the last one, remain the modules'."""
    changes = dict(disable_bias_linear=True, add_qkv_bias=qkv_bias, ffn_hidden_size=64)
    model, gated_ones = fused_model("QK-norm", **changes), []

    def tiles_for(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> Tiles:
        gated_ones.append(gated)
        return Tiles(16, 16, 1 if gated else 2, 3)

    with monkeypatch.context() as patched:
        patched.setattr(decode_layer, "tiles_for", tiles_for)
        direct, _ = passes(model)
    layers = len(model.layer_numbers)
    assert gated_ones.count(True) == 3 * layers  # in three passes
    assert gated_ones.count(False) == 3 * ((2 if qkv_bias else 3) * layers - 1)
    monkeypatch.setattr(FusedLayer, "decodes_directly", False)
    for hidden, expected in zip(direct, passes(model)[0], strict=True):
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


def test_a_hook_at_a_module_of_one_layer_runs():
    model, seen = fused_model("QK-norm"), []
    handle = model.decoder.layers[1].mlp.linear_fc2.register_forward_hook(lambda *_: seen.append(1))
    hooked, contexts = passes(model)
    assert seen == [1, 1, 1]
    assert all(context.direct_until is None for context in contexts)
    handle.remove()
    again, contexts = passes(model)
    assert all(context.direct_until is not None for context in contexts)
    assert all(torch.equal(hidden, expected) for hidden, expected in zip(hooked, again, strict=True))


@pytest.mark.parametrize("changes", [dict(swiglu=False), dict(normalization="LayerNorm"), dict(lora_rank=2)])
def test_what_is_not_the_plain_case_goes_through_modules(changes: dict[str, Any]):
    _, contexts = passes(fused_model("QK-norm", **changes))
    assert all(context.direct_until is None for context in contexts)
