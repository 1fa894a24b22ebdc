"""The paged attention kernels in the interpreter against their plain twins; on a GPU see ``test_gpu_decode``."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.layers.qkv_rope import QKVLayout
from dta_kernels.paged_attention import launch
from dta_kernels.paged_attention.launch import (
    LONGEST_SPLIT_RUN,
    PagedConfig,
    Parts,
    copy_pages,
    paged_attention,
    paged_config,
)
from mixed_rows_cases import mixed_error
from paged_attention_cases import NAN, PagedCase, relative_error
from triton_device import DEVICE, interpreter

FLOAT32 = 2e-6


def tiny(config: PagedConfig, **changes: int) -> PagedConfig:
    """Parts so small that a short sequence has several."""
    return replace(config, **{"keys": 16, "min_part": 16, "parts": 4, **changes})


@interpreter
@pytest.mark.parametrize("seed", range(8))
def test_random_passes_in_float32(seed: int):
    """Decoding, drafts and chunks together, on shuffled pages, with NaN at every place that must not be read."""
    generator = seed_all(seed)
    rows = int(generator.integers(1, 6))
    starts = generator.integers(0, 90, rows).tolist()
    counts = generator.choice([1, 1, 2, 5, 17], rows).tolist()
    groups, ratio = int(generator.integers(1, 4)), int(generator.choice([1, 2, 3, 7]))
    shape = (groups * ratio, groups, int(generator.choice([8, 20, 64])))
    page_size = int(generator.choice([1, 3, 16, 32]))
    case = PagedCase.random(generator, starts, counts, shape, torch.float32, DEVICE, page_size)
    config = paged_config(ratio, shape[2], torch.float32, max(counts))
    config = tiny(config, parts=int(generator.choice([1, 2, 16])), keys=int(generator.choice([16, 32])), min_part=32)
    padding = int(generator.integers(0, 3))
    n = len(case.query)
    out = case.run(config, padding)
    assert out[n:].isnan().all()
    assert relative_error(out[:n], case.expected()) < FLOAT32, (starts, counts, shape, page_size, config)


@interpreter
@pytest.mark.parametrize(
    ("head_size", "ratio", "dtype", "bound"),
    [
        *((64, 7, torch.float32, FLOAT32), (96, 4, torch.float32, FLOAT32), (128, 1, torch.float16, 2e-3)),
        *((256, 4, torch.float16, 2e-3), (96, 7, torch.bfloat16, 2e-2), (128, 4, torch.bfloat16, 2e-2)),
    ],
)
def test_head_sizes_with_the_tables_settings(head_size: int, ratio: int, dtype: torch.dtype, bound: float):
    generator = seed_all(10 * head_size + ratio)
    for starts, counts in (([300, 2, 0], [1, 1, 1]), ([40, 270], [3, 5])):
        case = PagedCase.random(generator, starts, counts, (ratio, 1, head_size), dtype, DEVICE)
        programs = 4096 if ratio % 2 else 1  # those of many sequences and of few
        out = case.run(paged_config(ratio, head_size, dtype, max(counts), programs))
        assert relative_error(out, case.expected()) < bound


@interpreter
def test_a_long_run_is_not_split():
    generator = seed_all(3)
    run = LONGEST_SPLIT_RUN + 9
    config = paged_config(2, 16, torch.float32, run)
    assert config.parts == 1
    assert [paged_config(2, 16, torch.float32, 1, programs).parts for programs in (512, 513)] == [16, 1]
    case = PagedCase.random(generator, [21, 0], [run, 70], (4, 2, 16), torch.float32, DEVICE)
    assert relative_error(case.run(config), case.expected()) < FLOAT32


@interpreter
@pytest.mark.parametrize("programs", [1, 8])
def test_a_row_has_the_same_bits_in_every_batch_and_run(programs: int, monkeypatch: pytest.MonkeyPatch):
    """However many programs share a tile: one has all parts of this batch, some of them, or each one part."""
    generator = seed_all(4)
    config = tiny(paged_config(2, 16, torch.float32, 1))
    case = PagedCase.random(generator, [70, 15, 131, 16], [1, 1, 1, 1], (4, 2, 16), torch.float32, DEVICE)
    together = case.run(config, padding=3)[:4]
    monkeypatch.setattr(launch, "_PROGRAMS", programs)
    assert torch.equal(together, case.run(config))
    tiles = case.tiles(1)
    for row in range(4):
        alone = torch.full_like(together, NAN)
        paged_attention(
            case.query, alone, case.addresses, 2, 16, tiles[row : row + 1], case.tables, case.scale, config, Parts()
        )
        assert torch.equal(alone[row], together[row])
        assert alone.isnan().any(-1).any(-1).sum() == 3


@interpreter
@pytest.mark.parametrize(
    ("layout", "rotated", "norm", "terms"),
    [(QKVLayout(1, 16, 96), 96, True, 1), (QKVLayout(3, 1, 24), 16, True, 3), (QKVLayout(2, 7, 64), 32, False, 1)],
)
def test_mixed_rows_give_the_bits_of_two_kernels(layout: QKVLayout, rotated: int, norm: bool, terms: int):
    """With one part of the keys, several, and a new key that is the only one of its part; and partly rotated heads."""
    generator, shape = seed_all(rotated), (layout, rotated, norm, terms)
    starts = [0, 15, 16, 40, 70]
    for dtype, bound in ((torch.float32, FLOAT32), (torch.float16, 3e-3)):
        config = tiny(paged_config(layout.heads_per_group, layout.head_size, dtype, 1))
        assert mixed_error(generator, starts, *shape, dtype, DEVICE, config, same_bits=True) < bound
        assert mixed_error(generator, [5, 9], *shape, dtype, DEVICE, replace(config, parts=1), True) < bound


def test_what_the_kernels_do_not_take_is_refused():
    with pytest.raises(ValueError, match="no paged attention kernel"):
        paged_config(2, 64, torch.float64, 1)
    query = torch.zeros(2, 4, 16).transpose(1, 2)
    tiles = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="adjacent channels"):
        paged_attention(
            query, torch.zeros(2, 16, 4), torch.zeros(2, dtype=torch.int64), 2, 16, tiles, tiles, 1.0,
            paged_config(2, 16, torch.float32, 1), Parts(),
        )  # fmt: skip


@interpreter
@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.bfloat16)])
def test_pages_are_copied_all_at_once(seed: int, dtype: torch.dtype):
    """Against a copy of each pool, with sources that are other copies' targets; no other page changes."""
    generator = seed_all(seed)
    shape = (9, int(generator.choice([3, 16])), int(generator.integers(1, 4)), int(generator.choice([20, 128])))
    pools = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(6)]
    pools[0][2] = NAN
    targets = generator.permutation(9)[:5]
    sources = generator.integers(0, 9, 5)
    sources[:2] = targets[1:3]
    old = [pool.clone() for pool in pools]
    addresses = torch.tensor([pool.data_ptr() for pool in pools], device=DEVICE).view(3, 2)
    pairs = torch.from_numpy(np.stack([sources, targets])).to(DEVICE)
    copy_pages(pairs[0], pairs[1], addresses, pools[0][0].numel(), dtype)
    for before, after in zip(old, pools, strict=True):
        expected = before.clone()
        expected[pairs[1]] = before[pairs[0]]
        assert torch.equal(after.nan_to_num(7.0), expected.nan_to_num(7.0))
