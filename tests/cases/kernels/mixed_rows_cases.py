"""Attention of mixed rows of decoding sequences, beside the two kernels that it replaces and beside float64."""

import numpy as np
import torch

from dta_kernels.layers import reference
from dta_kernels.layers.qkv_rope import MixedQKV, QKVLayout
from dta_kernels.layers.qkv_rope_pages import write_to_pages
from dta_kernels.paged_attention.launch import (
    PagedConfig,
    Parts,
    paged_attention,
    paged_attention_reference,
    write_pages_reference,
)
from dta_kernels.paged_attention.mixed_rows import attend_mixed
from paged_attention_cases import NAN, PagedCase, relative_error

EPS = 1e-6


def mixed_error(
    generator: np.random.Generator, starts: list[int], layout: QKVLayout, rotated: int, norm: bool, terms: int,
    dtype: torch.dtype, device: torch.device, config: PagedConfig, same_bits: bool,
) -> float:  # fmt: skip
    """Relative error of the output for sequences of ``starts`` cached positions, and rows of no sequence behind them;
    checks that pages are what is expected, that a repeat gives the same bits and, if ``same_bits``, that these are
    those of the kernels one after the other."""
    (G, P, D), n, extra = layout, len(starts), 2
    case = PagedCase.random(generator, starts, [1] * n, (G * P, G, D), dtype, device, page_size=4)

    def draw(*size: int) -> torch.Tensor:
        return torch.from_numpy(generator.standard_normal(size)).float().to(device)

    mixed = draw(terms, n + extra, G * (P + 2) * D)
    mixed = mixed if terms > 1 else mixed[0].to(dtype)
    angle = draw(n + extra, rotated // 2)
    weights = [(draw(D).abs() + 0.5).to(dtype) if norm else None for _ in range(2)]
    rows = MixedQKV(mixed, angle.cos(), angle.sin(), *weights, layout, EPS)
    slots = torch.cat([case.slots, torch.full((extra,), -1, device=device)])
    tiles, pools, parts = case.tiles(1, extra), (case.keys.clone(), case.values.clone()), Parts()

    def run() -> torch.Tensor:
        case.keys.copy_(pools[0])
        case.values.copy_(pools[1])
        out = torch.full((n + extra, G * P, D), NAN, dtype=dtype, device=device)
        attend_mixed(rows, out, case.addresses, slots, 4, tiles, case.tables, case.scale, config, parts)
        return out

    actual = run()
    assert torch.equal(actual[:n], run()[:n])
    assert actual[n:].isnan().all()
    assert parts.arrived is None or not parts.arrived.any()
    pages = case.keys.clone(), case.values.clone()
    case.keys.copy_(pools[0])
    case.values.copy_(pools[1])
    if same_bits:
        query, one_by_one = torch.empty_like(actual), torch.empty_like(actual)
        write_to_pages(rows, query, case.addresses, slots)
        of_paged = query[:n], one_by_one[:n], case.addresses, G, 4, tiles, case.tables, case.scale, config, Parts()
        paged_attention(*of_paged)
        assert torch.equal(actual[:n], one_by_one[:n])
    total = mixed.sum(0).to(dtype) if terms > 1 else mixed
    doubles = (None if weight is None else weight.double() for weight in weights)
    tables = angle.cos().double(), angle.sin().double()
    q, k, v = reference.qkv_rope(total.double(), *tables, *doubles, G, P, EPS)
    expected, out = [pool.double() for pool in pools], torch.zeros(n, G * P, D, dtype=torch.float64, device=device)
    write_pages_reference(k, v, *expected, slots)
    for page, wanted in zip(pages, expected, strict=True):
        assert torch.equal(page.isnan(), wanted.isnan())
        assert relative_error(page.nan_to_num(0), wanted.nan_to_num(0)) < (1e-6 if dtype == torch.float32 else 2e-2)
    paged_attention_reference(q[:n], out, *expected, case.tiles(1), case.tables, case.scale)
    return relative_error(actual[:n], out)
