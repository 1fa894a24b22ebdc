"""Draws a token for each row of logits and returns its logprob, in two Triton kernels that read the logits once.

In PyTorch this takes a dozen kernels over the whole vocabulary, most of them in float64: a tenth of a decoding pass.
Here the first kernel computes the maximum and the sum of exponentials of each block of a row. The second one finds the
block in which the draw falls, and reads that block again to find the token.

Only the first ``num_drawn`` tokens may be drawn. The others, which have no text, keep their part of the distribution
from which logprobs are computed. So the first kernel also computes the sum over those of a block's tokens that may be
drawn or, for temperature 0, their maximum.

The first kernel's exponentials are float32, as in the trainer, and their sums float64. The second one's are float64,
because they are relative to the largest logit of the row, and none may become 0. A draw is therefore the inverse of the
row's cumulative distribution at ``noise`` to the last bits of float32, and depends only on the row and its noise.

If the vocabulary is divided among ranks, they exchange the maxima and sums of their blocks. Each rank then finds the
same block, and the rank that has it finds the token (``draw_from_shards``). This takes the place of gathering logits.

``draw_tokens_reference`` is the plain PyTorch reference.

Legend: B rows, V vocabulary, or its part on this rank, K blocks of a row, J blocks on all ranks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed

from dta_kernels.launch import Launcher, ceil_div
from dta_kernels.logprobs.linear import VocabularyShard

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
    logits_in, largest_out, sum_out, drawn_out, size, num_drawn, num_blocks, row_stride, temperature,
    SCALE: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(logits_in + row * row_stride + token, temperature, SCALE, token < size)
    largest = tl.max(x, 0)
    weight = tl.exp(x - _shift_of(largest)).to(tl.float64)
    tl.store(largest_out + row * num_blocks + block, largest)
    tl.store(sum_out + row * num_blocks + block, tl.sum(weight, 0))
    if GREEDY:
        drawn = tl.max(tl.where(token < num_drawn, x, float("-inf")), 0).to(tl.float64)
    else:
        drawn = tl.sum(tl.where(token < num_drawn, weight, 0.0), 0)
    tl.store(drawn_out + row * num_blocks + block, drawn)


@triton.jit
def _draw_kernel(
    logits_in, largest_in, sum_in, drawn_in, noise_in, token_out, logprob_out, num_drawn, num_blocks, row_stride,
    temperature, first_block, first_token, SCALE: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, OWN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Writes zeros for a draw outside the ``OWN_BLOCKS`` blocks from ``first_block`` on."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCKS)
    largest_of = tl.load(largest_in + row * num_blocks + k, mask=k < num_blocks, other=float("-inf"))
    largest = tl.max(largest_of, 0)
    shift = _shift_of(largest).to(tl.float64)
    scale = tl.exp(_shift_of(largest_of).to(tl.float64) - shift)
    sums = tl.load(sum_in + row * num_blocks + k, mask=k < num_blocks, other=0.0) * scale
    total = tl.sum(tl.where(k == num_blocks - 1, tl.cumsum(sums, 0), 0.0), 0)
    if GREEDY:
        best_of = tl.load(drawn_in + row * num_blocks + k, mask=k < num_blocks, other=float("-inf"))
        best = tl.max(best_of, 0)
        block = tl.min(tl.where(best_of == best, k, num_blocks - 1), 0)
    else:
        parts = tl.load(drawn_in + row * num_blocks + k, mask=k < num_blocks, other=0.0) * scale
        until = tl.cumsum(parts, 0)
        threshold = tl.load(noise_in + row) * tl.sum(tl.where(k == num_blocks - 1, until, 0.0), 0)
        # With NaN or rounding, no block may be above the threshold; then the last block with any weight is taken.
        last = tl.max(tl.where(parts > 0, k, 0), 0)
        block = tl.minimum(tl.min(tl.where((until > threshold) & (parts > 0), k, BLOCKS), 0), last)
    i = tl.arange(0, BLOCK)
    token = (block - first_block) * BLOCK + i
    x = _scaled(logits_in + row * row_stride + token, temperature, SCALE, (token >= 0) & (token < num_drawn))
    if GREEDY:
        index = tl.min(tl.where(x == best, i, BLOCK - 1), 0)
    else:
        weight = tl.exp(x.to(tl.float64) - shift)
        rest = threshold - tl.sum(tl.where(k == block - 1, until, 0.0), 0)
        last = tl.max(tl.where(weight > 0, i, 0), 0)
        index = tl.minimum(tl.min(tl.where((tl.cumsum(weight, 0) > rest) & (weight > 0), i, BLOCK), 0), last)
    drawn = tl.minimum((block - first_block) * BLOCK + index, num_drawn - 1)
    chosen = tl.sum(tl.where(token == drawn, x, 0.0), 0)
    logprob = (chosen.to(tl.float64) - shift - tl.log(total)).to(tl.float32)
    is_own = (block >= first_block) & (block < first_block + OWN_BLOCKS)
    tl.store(token_out + row, tl.where(is_own, first_token + drawn, 0).to(tl.int64))
    tl.store(logprob_out + row, tl.where(is_own, logprob, 0.0))


def draw_tokens(
    logits_BV: Tensor, noise_B: Tensor, temperature: float, num_drawn: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row in proportion to its probability, and compute its logprob at ``temperature``.

    Temperature 0 takes the most likely token (the lowest of equals) and gives the logprob at temperature 1. A row that
    contains NaN gives an arbitrary token and a logprob of NaN.

    Args:
        logits_BV: 16 bits or float32, tokens of a row next to each other.
        noise_B: float64, in [0, 1).
        num_drawn: number of tokens, the first ones, that may be drawn (default: all).

    Returns:
        int64 [B] and float32 [B].
    """
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    size = logits_BV.shape[1]
    num_drawn = size if num_drawn is None else min(num_drawn, size)
    sums = _block_sums(logits_BV, (size, num_drawn), temperature)
    return _drawn(logits_BV, num_drawn, sums, noise_B, temperature)


def draw_from_shards(
    logits_BV: Tensor, sizes: tuple[int, int], noise_B: Tensor, temperature: float, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """``draw_tokens`` from logits that the ranks of ``shard.group`` divide among themselves.

    All ranks get the same result. It is that of the whole vocabulary in one tensor, unless a draw falls on the last
    bits of a border between two tokens, since the sums of blocks are added in another order.

    Args:
        logits_BV: of this rank, of the same shape on all ranks.
        sizes: number of its columns that are tokens, the rest being padding, and of those that may be drawn.
    """
    logits_BV = logits_BV.contiguous()
    largest_BK, *sums = _block_sums(logits_BV, sizes, temperature)
    own_3BK, ranks = torch.stack([largest_BK.double(), *sums]), shard.group.size()
    gathered = own_3BK.new_empty(3 * ranks, *largest_BK.shape)
    distributed.all_gather_into_tensor(gathered, own_3BK, group=shard.group)
    largest_BJ, *sums = gathered.view(ranks, *own_3BK.shape).permute(1, 2, 0, 3).flatten(2).contiguous()
    shard_begin = shard.group.rank() * largest_BK.shape[1], shard.first_token
    drawn = _drawn(logits_BV, sizes[1], (largest_BJ.float(), *sums), noise_B, temperature, shard_begin)
    # All ranks but one add zero.
    both_2B = torch.stack([part.double() for part in drawn])
    distributed.all_reduce(both_2B, group=shard.group)
    return both_2B[0].long(), both_2B[1].float()


def _block_sums(logits_BV: Tensor, sizes: tuple[int, int], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of each block [B, K], the sum of its exponentials, shifted by it, and the sum over the tokens that
    may be drawn (at temperature 0 their maximum).

    sizes: number of tokens, and of those that may be drawn.
    """
    B, V = logits_BV.shape
    K = ceil_div(V, _BLOCK)
    largest_BK = logits_BV.new_empty((B, K), dtype=torch.float32)
    sum_BK, drawn_BK = logits_BV.new_empty((2, B, K), dtype=torch.float64)
    if B:
        _blocks(temperature not in (0, 1), temperature == 0)(
            (B, K), logits_BV, largest_BK, sum_BK, drawn_BK, *sizes, K, logits_BV.stride(0), float(temperature)
        )
    return largest_BK, sum_BK, drawn_BK


def _drawn(
    logits_BV: Tensor, num_drawn: int, sums: tuple[Tensor, Tensor, Tensor], noise_B: Tensor, temperature: float,
    shard_begin: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens and logprobs by the ``sums`` of all blocks; ``shard_begin``: the rank's first block and token."""
    (B, V), J = logits_BV.shape, sums[0].shape[1]
    tokens = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    logprobs = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    if B:
        shape = triton.next_power_of_2(J), ceil_div(V, _BLOCK)
        _draws(temperature not in (0, 1), temperature == 0, *shape)(
            (B,), logits_BV, *sums, noise_B, tokens, logprobs, num_drawn, J, logits_BV.stride(0), float(temperature),
            *shard_begin
        )  # fmt: skip
    return tokens, logprobs


def draw_tokens_reference(
    logits_BV: Tensor, noise_B: Tensor, temperature: float, num_drawn: int | None = None
) -> tuple[Tensor, Tensor]:
    """``draw_tokens`` in plain PyTorch."""
    x = logits_BV.float()
    if temperature not in (0, 1):
        x = x / temperature
    logprobs_BV = torch.log_softmax(x.double(), dim=-1)[:, :num_drawn]
    x = x[:, :num_drawn]
    if temperature == 0:
        largest = x.amax(dim=-1, keepdim=True)
        tokens = (x == largest).to(torch.int8).argmax(dim=-1)
    else:
        until = logprobs_BV.exp().cumsum(dim=-1)
        above = until > noise_B[:, None] * until[:, -1:]
        token_ids = torch.arange(x.shape[1], device=x.device)
        tokens = torch.where(above & (logprobs_BV > float("-inf")), token_ids, x.shape[1] - 1).amin(dim=-1)
    return tokens, logprobs_BV.gather(1, tokens[:, None]).squeeze(1).float()


@lru_cache
def _blocks(scale: bool, greedy: bool) -> Launcher:
    return Launcher(_blocks_kernel, SCALE=scale, GREEDY=greedy, BLOCK=_BLOCK, num_warps=4)


@lru_cache
def _draws(scale: bool, greedy: bool, blocks: int, own_blocks: int) -> Launcher:
    constants = dict(SCALE=scale, GREEDY=greedy, BLOCK=_BLOCK, BLOCKS=blocks, OWN_BLOCKS=own_blocks)
    return Launcher(_draw_kernel, **constants, num_warps=8)
