"""Draws a token for each row of logits and returns its logprob, in two Triton kernels that read the logits once.

In PyTorch this takes a dozen kernels over the whole vocabulary, most of them in float64: a tenth of a decoding pass.
Here the first kernel computes the maximum and the sum of exponentials of each block of a row. The second one finds the
block in which the draw falls, and reads that block again to find the token.

Exponentials are float32, as in the trainer, and their sums float64. A draw is therefore the inverse of the row's
cumulative distribution at ``noise`` to the last bits, and the result of a row depends only on the row and its noise.

``draw_tokens_reference`` is the plain PyTorch reference.

Legend: B rows, V vocabulary, K blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dta_kernels.launch import Launcher, ceil_div

_BLOCK = 2048


@triton.jit
def _scaled(logits_in, temperature, SCALE: tl.constexpr, exists):
    x = tl.load(logits_in, mask=exists, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature) if SCALE else x


@triton.jit
def _shift_of(largest):
    """The shift of the exponents; minus infinity must not be subtracted from itself."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _blocks_kernel(
    logits_in, largest_out, sum_out, size, num_blocks, row_stride, temperature, SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(logits_in + row * row_stride + token, temperature, SCALE, token < size)
    largest = tl.max(x, 0)
    weight = tl.exp(x.to(tl.float64) - _shift_of(largest).to(tl.float64))
    tl.store(largest_out + row * num_blocks + block, largest)
    tl.store(sum_out + row * num_blocks + block, tl.sum(weight, 0))


@triton.jit
def _draw_kernel(
    logits_in, largest_in, sum_in, noise_in, token_out, logprob_out, size, num_blocks, row_stride, temperature,
    SCALE: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCKS)
    largest_of = tl.load(largest_in + row * num_blocks + k, mask=k < num_blocks, other=float("-inf"))
    largest = tl.max(largest_of, 0)
    shift = _shift_of(largest).to(tl.float64)
    sums = tl.load(sum_in + row * num_blocks + k, mask=k < num_blocks, other=0.0)
    sums = sums * tl.exp(_shift_of(largest_of).to(tl.float64) - shift)
    until = tl.cumsum(sums, 0)
    total = tl.sum(tl.where(k == num_blocks - 1, until, 0.0), 0)
    if GREEDY:
        block = tl.min(tl.where(largest_of == largest, k, num_blocks - 1), 0)
    else:
        threshold = tl.load(noise_in + row) * total
        # With NaN or rounding, no block may be above the threshold; then the last block with any weight is taken.
        last = tl.max(tl.where(sums > 0, k, 0), 0)
        block = tl.minimum(tl.min(tl.where((until > threshold) & (sums > 0), k, BLOCKS), 0), last)
    i = tl.arange(0, BLOCK)
    token = block * BLOCK + i
    x = _scaled(logits_in + row * row_stride + token, temperature, SCALE, token < size)
    if GREEDY:
        own = tl.min(tl.where(x == largest, i, BLOCK - 1), 0)
    else:
        weight = tl.exp(x.to(tl.float64) - shift)
        rest = threshold - tl.sum(tl.where(k == block - 1, until, 0.0), 0)
        last = tl.max(tl.where(weight > 0, i, 0), 0)
        own = tl.minimum(tl.min(tl.where((tl.cumsum(weight, 0) > rest) & (weight > 0), i, BLOCK), 0), last)
    drawn = tl.minimum(block * BLOCK + own, size - 1)
    chosen = tl.sum(tl.where(token == drawn, x, 0.0), 0)
    tl.store(token_out + row, drawn.to(tl.int64))
    tl.store(logprob_out + row, (chosen.to(tl.float64) - shift - tl.log(total)).to(tl.float32))


def draw_tokens(logits_BV: Tensor, noise_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw a token of each row in proportion to its probability, and compute its logprob at ``temperature``.

    Temperature 0 takes the most likely token (the lowest of equals) and gives the logprob at temperature 1. A row that
    contains NaN gives an arbitrary token and a logprob of NaN.

    Args:
        logits_BV: 16 bits or float32, tokens of a row next to each other.
        noise_B: float64, in [0, 1).

    Returns:
        int64 [B] and float32 [B].
    """
    B, V = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    K = ceil_div(V, _BLOCK)
    tokens = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    logprobs = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    if B == 0:
        return tokens, logprobs
    largest_BK = logits_BV.new_empty((B, K), dtype=torch.float32)
    sum_BK = logits_BV.new_empty((B, K), dtype=torch.float64)
    scale, shape = temperature not in (0, 1), (V, K, logits_BV.stride(0), float(temperature))
    _blocks(scale)((B, K), logits_BV, largest_BK, sum_BK, *shape)
    _draws(scale, temperature == 0, triton.next_power_of_2(K))(
        (B,), logits_BV, largest_BK, sum_BK, noise_B, tokens, logprobs, *shape
    )
    return tokens, logprobs


def draw_tokens_reference(logits_BV: Tensor, noise_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """``draw_tokens`` in plain PyTorch."""
    x = logits_BV.float()
    if temperature not in (0, 1):
        x = x / temperature
    logprobs_BV = torch.log_softmax(x.double(), dim=-1)
    if temperature == 0:
        largest = x.amax(dim=-1, keepdim=True)
        tokens = (x == largest).to(torch.int8).argmax(dim=-1)
    else:
        until = logprobs_BV.exp().cumsum(dim=-1)
        above = until > noise_B[:, None] * until[:, -1:]
        places = torch.arange(x.shape[1], device=x.device)
        tokens = torch.where(above & (logprobs_BV > float("-inf")), places, x.shape[1] - 1).amin(dim=-1)
    return tokens, logprobs_BV.gather(1, tokens[:, None]).squeeze(1).float()


_launchers: dict[tuple, Launcher] = {}


def _blocks(scale: bool) -> Launcher:
    key = ("blocks", scale)
    if key not in _launchers:
        _launchers[key] = Launcher(_blocks_kernel, SCALE=scale, BLOCK=_BLOCK, num_warps=4)
    return _launchers[key]


def _draws(scale: bool, greedy: bool, blocks: int) -> Launcher:
    key = ("draw", scale, greedy, blocks)
    if key not in _launchers:
        _launchers[key] = Launcher(_draw_kernel, SCALE=scale, GREEDY=greedy, BLOCK=_BLOCK, BLOCKS=blocks, num_warps=8)
    return _launchers[key]
