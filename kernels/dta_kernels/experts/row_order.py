"""Triton kernels that order the pairs of a token and an expert by expert: a stable counting sort in three launches.

PyTorch needs a dozen operations for it, each of which takes the host as long as a launch: counts, a sort by expert, its
inverse and a sort of each token's rows. Programs count the experts of a few tokens each; then each expert adds up its
counts of the programs before; then each pair finds its row: pairs of smaller experts, of the same expert in programs
before, and of the same expert before it in its own program.

Legend: N tokens, K experts of each, L experts to order by; pair number n K + k is expert k of token n. Pairs with other
experts come last.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

# Pairs of a program, and experts that it compares them with at a time.
_PAIRS, _STEP = 128, 64


@triton.jit
def _keys(
    chosen_in, num_tokens, first, LOCAL: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The pairs' numbers, whether they exist, and their experts, of which L are others and L + 1 none."""
    pair = tl.arange(0, TOKENS * WIDTH)
    token, nth = tl.program_id(0) * TOKENS + pair // WIDTH, pair % WIDTH
    exists = (token < num_tokens) & (nth < EACH)
    number = token.to(tl.int64) * EACH + nth
    key = tl.load(chosen_in + number, mask=exists, other=0).to(tl.int32) - first
    key = tl.where((key >= 0) & (key < LOCAL), key, LOCAL)
    return number, exists, tl.where(exists, key, LOCAL + 1)


@triton.jit(do_not_specialize=["num_tokens", "first", "num_programs"])
def _count_kernel(
    chosen_in, counts_out, num_tokens, first, num_programs, LOCAL: tl.constexpr, EACH: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    _, _, key = _keys(chosen_in, num_tokens, first, LOCAL, EACH, TOKENS, WIDTH)
    for begin in range(0, LOCAL + 1, STEP):
        expert = begin + tl.arange(0, STEP)
        count = tl.sum((key[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts_out + expert * num_programs + tl.program_id(0), count, mask=expert <= LOCAL)


@triton.jit(do_not_specialize=["num_programs"])
def _add_kernel(counts_io, totals_out, num_programs, BLOCK: tl.constexpr):
    program_counts, total = counts_io + tl.program_id(0) * num_programs, tl.zeros([], dtype=tl.int32)
    for begin in range(0, num_programs, BLOCK):
        program = begin + tl.arange(0, BLOCK)
        count = tl.load(program_counts + program, mask=program < num_programs, other=0)
        tl.store(program_counts + program, total + tl.cumsum(count, 0) - count, mask=program < num_programs)
        total += tl.sum(count, 0)
    tl.store(totals_out + tl.program_id(0), total.to(tl.int64))


@triton.jit(do_not_specialize=["num_tokens", "first", "num_programs", "most"])
def _place_kernel(
    chosen_in, before_in, totals_in, entries_out, tokens_out, places_out, num_tokens, first, num_programs, most,
    LOCAL: tl.constexpr, EACH: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    number, exists, key = _keys(chosen_in, num_tokens, first, LOCAL, EACH, TOKENS, WIDTH)
    pair = tl.arange(0, TOKENS * WIDTH)
    target_row = tl.load(before_in + key * num_programs + tl.program_id(0), mask=exists, other=0)
    is_before = (key[:, None] == key[None, :]) & (pair[None, :] < pair[:, None])
    target_row += tl.sum(is_before.to(tl.int32), 1)
    for begin in range(0, LOCAL, STEP):
        expert = begin + tl.arange(0, STEP)
        total = tl.load(totals_in + expert, mask=expert < LOCAL, other=0).to(tl.int32)
        target_row += tl.sum(tl.where(expert[None, :] < key[:, None], total[None, :], 0), 1)
    has_row = exists & (target_row < most)
    tl.store(entries_out + target_row, number, mask=has_row)
    tl.store(tokens_out + target_row, number // EACH, mask=has_row)
    # The token's rows ascend with its experts.
    is_own = pair[None, :] // WIDTH == pair[:, None] // WIDTH
    is_less = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (pair[None, :] < pair[:, None]))
    rank = tl.sum((is_own & is_less).to(tl.int32), 1)
    target = places_out + number // EACH * EACH + rank
    tl.store(target, tl.where(key < LOCAL, target_row, -1).to(tl.int64), mask=exists)


_KERNELS = {"count": _count_kernel, "place": _place_kernel}


@lru_cache
def _launcher(name: str, experts_per_token: int, num_local: int) -> Launcher:
    width = triton.next_power_of_2(experts_per_token)
    sizes = dict(LOCAL=num_local, EACH=experts_per_token, TOKENS=max(1, _PAIRS // width), WIDTH=width, STEP=_STEP)
    return Launcher(_KERNELS[name], **sizes, num_warps=8)


@lru_cache
def _adder() -> Launcher:
    return Launcher(_add_kernel, BLOCK=1024, num_warps=4)


def order_rows(chosen_NK: Tensor, first: int, num_local: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dta_kernels.experts.reference.order_rows``, bit for bit."""
    (tokens, experts_per_token), chosen = chosen_NK.shape, chosen_NK.contiguous()
    totals = torch.zeros(num_local + 1, dtype=torch.int64, device=chosen.device) if not tokens else None
    entries, of_tokens = chosen.new_empty((2, most), dtype=torch.int64).unbind()
    rows_of_pairs = chosen.new_empty((tokens, experts_per_token), dtype=torch.int64)
    if tokens:
        programs = ceil_div(tokens, max(1, _PAIRS // triton.next_power_of_2(experts_per_token)))
        before = chosen.new_empty((num_local + 1, programs), dtype=torch.int32)
        totals = chosen.new_empty(num_local + 1, dtype=torch.int64)
        _launcher("count", experts_per_token, num_local)((programs,), chosen, before, tokens, first, programs)
        _adder()((num_local + 1,), before, totals, programs)
        _launcher("place", experts_per_token, num_local)(
            (programs,), chosen, before, totals, entries, of_tokens, rows_of_pairs, tokens, first, programs, most
        )
    return totals[:num_local], entries, of_tokens, rows_of_pairs
