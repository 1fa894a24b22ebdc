"""RMSNorm, QK-norm with rotary positions and SwiGLU in Triton's interpreter against plain twins: values, gradients."""

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.layers import qkv_rope as qkv_module
from dta_kernels.layers import rms_norm as norm_module
from dta_kernels.layers.qkv_rope import MixedQKV, QKVLayout, qkv_rope
from fused_layer_cases import (
    EPS,
    check_16_bits,
    check_float32,
    check_recomputed_bits,
    errors,
    norm_case,
    qkv_case,
    swiglu_case,
    tables,
)
from triton_device import interpreter

pytestmark = interpreter

# (make, its arguments): odd sizes, one row, none.
CASES = {
    "norm": (norm_case, (7, 24, False)),
    "norm-odd": (norm_case, (5, 37, False)),
    "norm-add": (norm_case, (9, 40, True)),
    "norm-add-odd": (norm_case, (1, 1025, True)),
    "norm-none": (norm_case, (0, 24, True)),
    "qwen3": (qkv_case, (19, QKVLayout(2, 2, 8), 8, True)),
    "heads-of-96": (qkv_case, (5, QKVLayout(1, 3, 96), 96, True)),
    "heads-of-256": (qkv_case, (3, QKVLayout(2, 1, 256), 256, False)),
    "partly-rotated": (qkv_case, (18, QKVLayout(3, 1, 20), 6, True)),
    "llama": (qkv_case, (33, QKVLayout(1, 4, 16), 16, False)),
    "qkv-none": (qkv_case, (0, QKVLayout(2, 2, 8), 8, True)),
    "swiglu": (swiglu_case, (6, 40)),
    "swiglu-odd": (swiglu_case, (3, 2051)),
    "swiglu-none": (swiglu_case, (0, 40)),
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that a kernel must fill starts as NaN; few programs, so that each has several rows."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(norm_module, "_MAX_PROGRAMS", 4)
    monkeypatch.setattr(qkv_module, "_MAX_PROGRAMS", 4)


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_twin(name):
    seed_all(list(CASES).index(name))
    make, arguments = CASES[name]
    check_float32(*make(*arguments), 1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if "none" not in name])
def test_16_bits_are_as_near_to_float64_as_the_twin(name):
    """In float16: Triton's interpreter cuts bfloat16 off where a GPU rounds."""
    seed_all(len(name))
    make, arguments = CASES[name]
    check_16_bits(*make(*arguments), torch.float16, 1.1)


def test_a_residual_without_use_and_a_norm_without_use_have_their_gradients():
    seed_all(3)
    kernel, twin, inputs = norm_case(6, 24, True)
    for used in (0, 1):
        gradients = []
        for run, dtype in ((kernel, torch.float32), (twin, torch.float64)):
            leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
            out = run(*leaves)[used]
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
            gradients.append([torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)])
        assert max(errors(*gradients)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_again_is_the_same_bit_for_bit(dtype):
    seed_all(4)
    check_recomputed_bits(dtype, "cpu", 37, 41, QKVLayout(2, 3, 20), 12)


def test_values_are_a_view_and_one_weight_is_refused():
    seed_all(5)
    mixed, weight = torch.randn(4, 64), torch.ones(8)
    rows = MixedQKV(mixed, *tables(4, 8), None, None, QKVLayout(2, 2, 8), EPS)
    value = qkv_rope(rows)[2]
    assert value.untyped_storage().data_ptr() == mixed.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="give both weights or none"):
        qkv_rope(rows._replace(q_weight=weight))
