"""Products of few rows in Triton's interpreter, the kernels that read their terms, and the choice of tiles."""

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.layers import reference
from dta_kernels.layers.few_rows import Tiles, few_rows_product, few_rows_tiles, tiles_for
from dta_kernels.layers.qkv_rope import QKVLayout
from dta_kernels.layers.rms_norm import rms_norm_forward
from few_rows_cases import EPS, check_pages, product_errors
from paged_attention_cases import relative_error
from triton_device import DEVICE, interpreter


# Triton's interpreter cuts bfloat16 off where a GPU rounds.
@interpreter
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("terms", [1, 4])
def test_a_product_and_its_swiglu(terms: int, dtype: torch.dtype, bound: float):
    seed_all(terms)
    for n in (1, 33, 131):
        assert product_errors(n, (48, 128), Tiles(16, 32, terms, 3), dtype, DEVICE) < bound


@interpreter
@pytest.mark.parametrize("terms", [1, 4])
def test_the_norm_adds_terms_in_order(terms: int):
    seed_all(8)
    x, added, weight = torch.randn(5, 1, 37).half(), torch.randn(terms, 5, 1, 37), torch.rand(37).half() + 0.5
    normed, residual, _ = rms_norm_forward(x, weight, EPS, added, overlap=True)
    total = sum(added[1:], added[0]).half() if terms > 1 else added[0]
    expected, stream = reference.rms_norm(x, weight, EPS, total)
    assert torch.equal(residual, stream)
    assert relative_error(normed, expected) < 1e-3


@interpreter
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize(
    ("n", "layout", "rotated", "norm"),
    [(19, QKVLayout(2, 2, 8), 8, True), (5, QKVLayout(1, 3, 96), 96, False), (18, QKVLayout(3, 1, 20), 6, True)],
)
def test_queries_and_pages(n: int, layout: QKVLayout, rotated: int, norm: bool, terms: int):
    generator = seed_all(n)
    assert check_pages(generator, n, layout, rotated, norm, terms, torch.float32, DEVICE) < 1e-6
    assert check_pages(generator, n, layout, rotated, norm, terms, torch.float16, DEVICE) < 1e-3


def test_what_the_kernel_does_not_take_is_left_or_refused():
    x, weight = torch.zeros(4, 2048, dtype=torch.bfloat16), torch.zeros(4096, 2048, dtype=torch.bfloat16)
    assert tiles_for(x, weight) is None  # on a CPU
    for rows, size in ((256, 576), (64, 2048)):  # a small weight, and another one
        assert [few_rows_tiles(n, size, size, False) is None for n in (rows, rows + 1)] == [False, True]
    with pytest.raises(ValueError, match="contiguous"):
        few_rows_product(weight.t()[:4], weight.t(), Tiles(64, 64, 1, 3))
    with pytest.raises(ValueError, match="divide them"):
        few_rows_product(x, weight, Tiles(64, 96, 2, 3))
