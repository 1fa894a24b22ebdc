"""Triton products of few rows with a weight, for decoding: they read the weight once, at the rate of the memory.

A weight of a few thousand rows and columns has too few tiles for a whole GPU, so its columns are divided, too. Every
program stores its term of the sum in float32, and the kernel that reads the product adds the terms in order
(``sum_of_terms``) and rounds the sum as a product is rounded: no atomics, no kernel of its own for the sum. The first
product of a feed-forward layer is wide enough without; its kernel computes gate and up projection of the same columns,
and SwiGLU of both.

A product whose output is added to the residual stream can also do what lies between it and the next product
(``product_into_stream``). The program that finishes the last term of a tile adds all of them to the stream, and writes
the tile times the next norm's weight and the sum of its squares. The next product multiplies these rows and divides its
result by their root mean square, so no kernel of its own normalizes them.

A tile has 64 rows for any smaller number, so a row has the same bits in every batch of up to 64.

Legend: n rows, N outputs, K inputs, S terms, T tiles of outputs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher
from dta_kernels.overlap import overlap_settings, wait_for_previous
from dta_kernels.tree_attention.common import product

_ROWS = 64
# Programs for which a GPU of 132 processors was measured: at least this many, with one or two of them on a processor.
_LEAST_PROGRAMS, _ONE_EACH, _TWO_EACH = 96, 132, 264
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


@triton.jit
def _tile(
    x_in, weight_in, row, exists, output, begin, N: tl.constexpr, K: tl.constexpr, LENGTH: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Products [ROWS, OUTPUTS] of ``LENGTH`` inputs from ``begin`` on with ``weight`` and, if GATED, its other half."""
    acc = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    of_output = weight_in + output.to(tl.int64) * K
    for first in range(0, LENGTH, INPUTS):
        k = begin + first + tl.arange(0, INPUTS)
        x = tl.load(x_in + row * K + k[None, :], mask=exists, other=0.0)
        acc = product(x, tl.load(of_output + k[:, None]), acc, "ieee", UPCAST)
        if GATED:
            up = product(x, tl.load(of_output + N * K + k[:, None]), up, "ieee", UPCAST)
    return acc, up


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_in, weight_in, squares_in, out, num_rows, eps, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TERMS: tl.constexpr, GATED: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr, UPCAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N / OUTPUTS, TERMS). GATED: ``silu(gate) * up`` of ``weight`` [2 N, K]. SQUARES: number of sums whose total
    is the sum of the squares of a row, by whose root mean square the result is divided; 0 for none."""
    wait_for_previous(OVERLAP)
    row = tl.arange(0, ROWS)[:, None]
    exists = row < num_rows
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
    if SQUARES:
        # Loaded here and summed below, so that nobody waits for them.
        part = tl.arange(0, BLOCK_SQUARES)[None, :]
        squares = tl.load(squares_in + row * SQUARES + part, mask=exists & (part < SQUARES), other=0.0)
    begin = tl.program_id(1) * (K // TERMS)
    acc, up = _tile(x_in, weight_in, row, exists, output, begin, N, K, K // TERMS, ROWS, OUTPUTS, INPUTS, GATED, UPCAST)
    if SQUARES:
        rstd = (1.0 / tl.sqrt(tl.sum(squares, 1) / K + eps))[:, None]
        acc, up = acc * rstd, up * rstd
    element = out.dtype.element_ty
    if GATED:
        gate, up = acc.to(element).to(tl.float32), up.to(element).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * up
    place = (tl.program_id(1) * num_rows + row) * N + output
    tl.store(out + place, acc.to(element), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _into_stream_kernel(
    x_in, weight_in, stream_in, norm_in, terms_out, arrived, stream_out, weighted_out, squares_out, num_rows,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TERMS: tl.constexpr, WEIGHTED: tl.constexpr, UPCAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N / OUTPUTS, TERMS). ``arrived``, int32 [N / OUTPUTS], is zero before and after."""
    wait_for_previous(OVERLAP)
    row = tl.arange(0, ROWS)[:, None]
    exists = row < num_rows
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
    begin = tl.program_id(1) * (K // TERMS)
    acc, _ = _tile(x_in, weight_in, row, exists, output, begin, N, K, K // TERMS, ROWS, OUTPUTS, INPUTS, False, UPCAST)
    place, size = row * N + output, num_rows * N
    stream = tl.load(stream_in + place, mask=exists, other=0.0).to(tl.float32)
    if WEIGHTED:
        norm = tl.load(norm_in + output).to(tl.float32)
    tl.store(terms_out + tl.program_id(1) * size + place, acc, mask=exists)
    # All threads have stored before the addition releases it to the program that arrives last.
    tl.debug_barrier()
    arrived += tl.program_id(0)
    if tl.atomic_add(arrived, 1, sem="acq_rel") == TERMS - 1:
        tl.store(arrived, 0)
        element = stream_out.dtype.element_ty
        # Not from the processor's own cache, which knows nothing of what other programs have stored.
        total = tl.load(terms_out + place, mask=exists, other=0.0, cache_modifier=".cg")
        for term in tl.static_range(1, TERMS):
            total += tl.load(terms_out + term * size + place, mask=exists, other=0.0, cache_modifier=".cg")
        rounded = (stream + total.to(element).to(tl.float32)).to(element)
        tl.store(stream_out + place, rounded, mask=exists)
        if WEIGHTED:
            x = rounded.to(tl.float32)
            tl.store(weighted_out + place, (x * norm).to(element), mask=exists)
            squares = squares_out + row * tl.num_programs(0) + tl.program_id(0)
            tl.store(squares, tl.sum(x * x, 1)[:, None], mask=exists)


@lru_cache
def few_rows_tiles(num_rows: int, N: int, K: int, gated: bool) -> Tiles | None:
    """Settings by which tiles of a product occupy a GPU evenly; None where a library's product does it better.

    Args:
        N: outputs; of a gated product those after the gate.
    """
    if num_rows > _ROWS:
        return None
    tried = [Tiles(32, 64, 1, 5)] if gated else [Tiles(64, i, s, 5) for i in (128, 64) for s in (1, 2, 4, 8)]
    for tiles in tried:
        programs, most = N // tiles.outputs * tiles.terms, _ONE_EACH if tiles.inputs == 128 else _TWO_EACH
        if N % tiles.outputs == K % (tiles.terms * tiles.inputs) == 0 and _LEAST_PROGRAMS <= programs <= most:
            return tiles
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


class WeightedRows(NamedTuple):
    """Rows times the weight of a norm, rounded, whose division by their root mean square is left to the product.

    Attributes:
        rows: [n, C].
        squares: float32 [n, T]; its sum is that of the squares of a row before the multiplication.
    """

    rows: Tensor
    squares: Tensor


def few_rows_product(x_nK: Tensor | WeightedRows, weight_NK: Tensor, tiles: Tiles, eps: float = 0.0) -> Tensor:
    """Terms [S, n, N] of ``x @ weight.T``: float32, or the product itself in the dtype of ``x`` if it is one.

    eps: of the norm of ``WeightedRows``.
    """
    rows = x_nK.rows if isinstance(x_nK, WeightedRows) else x_nK
    dtype = torch.float32 if tiles.terms > 1 else rows.dtype
    out = rows.new_empty(tiles.terms, len(rows), len(weight_NK), dtype=dtype)
    _launch(x_nK, weight_NK, out, tiles, False, eps)
    return out


def gated_product(x_nK: Tensor | WeightedRows, weight_NK: Tensor, tiles: Tiles, eps: float = 0.0) -> Tensor:
    """``silu(gate) * up`` [n, N / 2] of ``[gate, up] = x @ weight.T``, which are rounded first."""
    rows = x_nK.rows if isinstance(x_nK, WeightedRows) else x_nK
    out = rows.new_empty(len(rows), len(weight_NK) // 2)
    _launch(x_nK, weight_NK, out, tiles, True, eps)
    return out


def product_into_stream(
    x_nK: Tensor, weight_NK: Tensor, stream_nN: Tensor, norm_N: Tensor | None, tiles: Tiles, arrived: Tensor
) -> tuple[Tensor, WeightedRows | None]:
    """``stream + x @ weight.T``, whose product is rounded first, and its rows for the next product.

    Args:
        norm_N: weight of the next norm; None for none.
        arrived: int32 zeros, at least one for each tile of outputs; they are zeros again afterwards.
    """
    (n, K), N, programs = x_nK.shape, len(weight_NK), len(weight_NK) // tiles.outputs
    _check(x_nK, weight_NK, N, tiles)
    terms = x_nK.new_empty(tiles.terms, n, N, dtype=torch.float32)
    stream, weighted = torch.empty_like(stream_nN), torch.empty_like(stream_nN)
    squares = x_nK.new_empty(n, programs, dtype=torch.float32)
    _into_stream(N, K, tiles, norm_N is not None, _upcast(x_nK))(
        (programs, tiles.terms), x_nK, weight_NK, stream_nN, stream_nN if norm_N is None else norm_N, terms, arrived,
        stream, weighted, squares, n,
    )  # fmt: skip
    return stream, None if norm_N is None else WeightedRows(weighted, squares)


def _launch(x: Tensor | WeightedRows, weight: Tensor, out: Tensor, tiles: Tiles, gated: bool, eps: float) -> None:
    rows, squares = x if isinstance(x, WeightedRows) else (x, None)
    N, K = out.shape[-1], rows.shape[1]
    _check(rows, weight, N, tiles)
    num_squares = 0 if squares is None else squares.shape[1]
    _launcher(N, K, tiles, gated, num_squares, _upcast(rows))(
        (N // tiles.outputs, tiles.terms), rows, weight, rows if squares is None else squares, out, len(rows), eps
    )


def _check(x: Tensor, weight: Tensor, N: int, tiles: Tiles) -> None:
    is_even = N % tiles.outputs == x.shape[1] % (tiles.terms * tiles.inputs) == 0
    if not is_even or len(x) > _ROWS or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"a product of few rows takes up to {_ROWS}, contiguous tensors, and tiles that divide them")


def _upcast(x: Tensor) -> bool:
    return not x.is_cuda and x.dtype == torch.bfloat16


@lru_cache
def _launcher(N: int, K: int, tiles: Tiles, gated: bool, num_squares: int, upcast: bool) -> Launcher:
    squares = {"SQUARES": num_squares, "BLOCK_SQUARES": triton.next_power_of_2(max(1, num_squares))}
    return Launcher(_product_kernel, GATED=gated, **squares, **_constants(N, K, tiles, upcast))


@lru_cache
def _into_stream(N: int, K: int, tiles: Tiles, weighted: bool, upcast: bool) -> Launcher:
    return Launcher(_into_stream_kernel, WEIGHTED=weighted, **_constants(N, K, tiles, upcast))


def _constants(N: int, K: int, tiles: Tiles, upcast: bool) -> dict[str, int]:
    constants = {"N": N, "K": K, "ROWS": _ROWS, "OUTPUTS": tiles.outputs, "INPUTS": tiles.inputs, "TERMS": tiles.terms}
    return constants | {"UPCAST": upcast, **overlap_settings(), "num_warps": 4, "num_stages": tiles.stages}
