"""Triton products of few rows with a weight, for decoding: they read the weight at the rate of the memory.

A weight of a few thousand rows and columns has too few tiles for a whole GPU, so its columns are divided, too. Every
program stores its term of the sum in float32, and the kernel that reads the product adds the terms in order
(``sum_of_terms``) and rounds the sum as a product is rounded: no atomics, no kernel of its own for the sum. The first
product of a feed-forward layer is wide enough without; its kernel computes gate and up projection of the same columns,
and SwiGLU of both.

A tile has 64 rows, also for a smaller number, so a row has the same bits in every batch that this kernel takes.

Legend: n rows, N outputs, K inputs, S terms.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.overlap import overlap_settings, wait_for_previous
from dta_kernels.tree_attention.common import product

_ROWS = 64
# Up to so many rows they are faster than the library's products; a small weight occupies no GPU by itself.
_MOST_ROWS, _MOST_ROWS_SMALL = 64, 256
# Programs for which a GPU of 132 processors was measured: from these on, with one or two of them on a processor.
_LEAST, _LEAST_SMALL, _ONE_EACH, _TWO_EACH = 96, 30, 132, 264
_SHARED_BYTES = 200_000


class Tiles(NamedTuple):
    """Settings of a product: outputs and inputs of a tile, number of terms, stages of the pipeline."""

    outputs: int
    inputs: int
    terms: int
    stages: int


@triton.jit
def sum_of_terms(source, mask, size, TERMS: tl.constexpr, element: tl.constexpr):
    """The sum of ``TERMS`` values that are ``size`` elements apart, in order and rounded to ``element``; float32."""
    total = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if TERMS > 1:
        for term in tl.static_range(1, TERMS):
            total += tl.load(source + term * size, mask=mask, other=0.0).to(tl.float32)
        total = total.to(element).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_in, weight_in, out, num_rows, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, TERMS: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N / OUTPUTS, TERMS, tiles of rows). GATED: ``silu(gate) * up`` of ``weight`` [2 N, K]."""
    wait_for_previous(OVERLAP)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None]
    exists = row < num_rows
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
    begin = tl.program_id(1) * (K // TERMS)
    inner = tl.arange(0, INPUTS)
    acc = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    of_output = weight_in + output.to(tl.int64) * K
    for first in range(0, K // TERMS, INPUTS):
        k = begin + first + inner
        x = tl.load(x_in + row * K + k[None, :], mask=exists, other=0.0)
        acc = product(x, tl.load(of_output + k[:, None]), acc)
        if GATED:
            up = product(x, tl.load(of_output + N * K + k[:, None]), up)
    element = out.dtype.element_ty
    if GATED:
        gate, up = acc.to(element).to(tl.float32), up.to(element).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * up
    offset = (tl.program_id(1) * num_rows + row) * N + output
    tl.store(out + offset, acc.to(element), mask=exists)


@lru_cache
def few_rows_tiles(num_rows: int, N: int, K: int, gated: bool) -> Tiles | None:
    """Settings by which tiles of a product occupy a GPU evenly; None where a library's product does it better.

    Args:
        N: outputs; of a gated product those after the gate.
    """
    if gated:
        tried = [(Tiles(32, 64, 1, 5), _TWO_EACH)]
    else:
        tried = [(Tiles(64, 128, terms, 5), _ONE_EACH) for terms in (1, 2, 4, 8)]
        tried += [(Tiles(64, 64, terms, 5), _TWO_EACH) for terms in (1, 2, 4, 8)]
        # Small weights, whose tiles do not occupy a GPU; with more terms they occupy more of it.
        tried += [(Tiles(32, 64, terms, 6), _ONE_EACH) for terms in (4, 3, 2, 1)]
    for tiles, most in tried:
        programs = N // tiles.outputs * tiles.terms
        is_small = tiles.outputs == 32 and (not gated or programs < _LEAST)
        least, most_rows = (_LEAST_SMALL, _MOST_ROWS_SMALL) if is_small else (_LEAST, _MOST_ROWS)
        if N % tiles.outputs == K % (tiles.terms * tiles.inputs) == 0 and least <= programs <= most:
            return tiles if num_rows <= most_rows else None
    return None


def tiles_for(x_nK: Tensor, weight_NK: Tensor, gated: bool = False) -> Tiles | None:
    """``few_rows_tiles`` of a product; None on devices and for dtypes without such kernels, too."""
    if not x_nK.is_cuda or x_nK.element_size() != 2 or not len(x_nK) or not _fits(x_nK.device):
        return None
    N, K = weight_NK.shape
    return few_rows_tiles(len(x_nK), N // 2 if gated else N, K, gated)


@lru_cache
def _fits(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _SHARED_BYTES


def few_rows_product(x_nK: Tensor, weight_NK: Tensor, tiles: Tiles) -> Tensor:
    """Terms [S, n, N] of ``x @ weight.T``: float32, or the product itself in the dtype of ``x`` if it is one."""
    dtype = torch.float32 if tiles.terms > 1 else x_nK.dtype
    out = x_nK.new_empty(tiles.terms, len(x_nK), len(weight_NK), dtype=dtype)
    _launch(x_nK, weight_NK, out, tiles, False)
    return out


def gated_product(x_nK: Tensor, weight_NK: Tensor, tiles: Tiles) -> Tensor:
    """``silu(gate) * up`` [n, N / 2] of ``[gate, up] = x @ weight.T``, which are rounded first."""
    out = x_nK.new_empty(len(x_nK), len(weight_NK) // 2)
    _launch(x_nK, weight_NK, out, tiles, True)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, tiles: Tiles, gated: bool) -> None:
    N, K = out.shape[-1], x.shape[1]
    is_even = N % tiles.outputs == K % (tiles.terms * tiles.inputs) == 0
    if not is_even or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("a product of few rows takes contiguous tensors and tiles that divide them")
    grid = N // tiles.outputs, tiles.terms, ceil_div(len(x), _ROWS)
    _launcher(N, K, tiles, gated)(grid, x, weight, out, len(x))


@lru_cache
def _launcher(N: int, K: int, tiles: Tiles, gated: bool) -> Launcher:
    constants = {"N": N, "K": K, "ROWS": _ROWS, "OUTPUTS": tiles.outputs, "INPUTS": tiles.inputs, "TERMS": tiles.terms}
    constants |= {"GATED": gated, **overlap_settings()}
    return Launcher(_product_kernel, **constants, num_warps=4, num_stages=tiles.stages)
