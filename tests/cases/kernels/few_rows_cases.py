"""Products of few rows and what reads their terms, against float64, for the interpreter and for a GPU."""

import numpy as np
import torch

from dta_kernels.layers import reference
from dta_kernels.layers.few_rows import Tiles, few_rows_product, gated_product
from dta_kernels.layers.qkv_rope import MixedQKV, QKVLayout
from dta_kernels.layers.qkv_rope_pages import write_to_pages
from dta_kernels.paged_attention.launch import write_pages_reference
from paged_attention_cases import NAN, relative_error

EPS = 1e-6


def product_errors(n: int, sizes: tuple[int, int], tiles: Tiles, dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of the sum of the terms, or of a gated product (one term per tile of both kinds), for rows behind
    which memory is NaN; checks that a repeat and a single row give the same bits."""
    (N, K), gated = sizes, tiles.terms == 1
    x = torch.full((n + 3, K), NAN, dtype=dtype, device=device)
    x[:n] = torch.randn(n, K, device=device)
    weight = (torch.randn((2 if gated else 1) * N, K, device=device) * K**-0.5).to(dtype)
    run = gated_product if gated else few_rows_product
    product = run(x[:n], weight, tiles)
    assert torch.equal(product, run(x[:n], weight, tiles))
    assert torch.equal(product[..., n // 2, :], run(x[n // 2 : n // 2 + 1], weight, tiles)[..., 0, :])
    exact = x[:n].double() @ weight.double().t()
    if not gated:
        assert product.shape == (tiles.terms, n, N)
        assert product.dtype == torch.float32
        return relative_error(product.sum(0), exact)
    return relative_error(product, reference.swiglu(exact.to(dtype)))


def check_pages(
    generator: np.random.Generator, n: int, layout: QKVLayout, rotated: int, norm: bool, terms: int, dtype: torch.dtype,
    device: torch.device,
) -> float:  # fmt: skip
    """Largest relative error of queries and pages, which are NaN where nothing may be written."""
    G, P, D = layout
    size = (n, G * (P + 2) * D)
    mixed = torch.randn(*((terms,) if terms > 1 else ()), *size, device=device)
    mixed = mixed if terms > 1 else mixed.to(dtype)
    angle = torch.rand(n, rotated // 2, device=device) * 6
    weights = [(torch.rand(D, device=device) + 0.5).to(dtype) if norm else None for _ in range(2)]
    slots = torch.from_numpy(generator.permutation(3 * (n + 2))[:n]).to(device)
    slots[generator.random(n) < 0.2] = -1
    pools = [torch.full((n + 2, 3, G, D), NAN, dtype=dtype, device=device) for _ in range(2)]
    addresses = torch.tensor([pool.data_ptr() for pool in pools], device=device)
    query = torch.full((n, G * P, D), NAN, dtype=dtype, device=device)
    write_to_pages(MixedQKV(mixed, angle.cos(), angle.sin(), *weights, layout, EPS), query, addresses, slots)
    total = mixed.sum(0).to(dtype) if terms > 1 else mixed
    doubles = (None if weight is None else weight.double() for weight in weights)
    table = angle.cos().double(), angle.sin().double()
    q, k, v = reference.qkv_rope(total.double(), *table, *doubles, G, P, EPS)
    expected = [torch.full_like(pool, NAN, dtype=torch.float64) for pool in pools]
    write_pages_reference(k, v, *expected, slots)
    for actual, wanted in zip(pools, expected, strict=True):
        assert torch.equal(actual.isnan(), wanted.isnan())
    pairs = zip((query, *pools), (q, *expected), strict=True)
    return max(relative_error(actual.nan_to_num(0), wanted.nan_to_num(0)) for actual, wanted in pairs)
