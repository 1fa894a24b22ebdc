"""Tokens drawn from logits that two ranks divide are those drawn from the whole, in Triton's interpreter."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dta_kernels.logprobs.draw_tokens import draw_from_shards, draw_tokens
from dta_kernels.logprobs.linear import VocabularyShard
from mesh_worker import run_on_ranks
from triton_device import interpreter

# Tokens, and columns of a rank: the last rank has padding, two blocks besides, or nothing else.
SIZES = {"odd": (5001, 2560), "padded by blocks": (5000, 4500), "one token": (4097, 4096), "nothing": (100, 128)}
DRAWS = ((torch.float32, 0.0), (torch.bfloat16, 0.7), (torch.float32, 1.0))
ROWS = 9
# Tokens at the end that may not be drawn; more than the second rank has, or none.
LAST = {"odd": 2500, "padded by blocks": 3, "one token": 1, "nothing": 0}


def logits_of(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the whole vocabulary, some of them minus infinity and some equal, and noise."""
    generator = torch.Generator().manual_seed(len(name))
    size, _ = SIZES[name]
    steepness = 10 ** torch.empty(ROWS, 1).uniform_(-1, 1, generator=generator)
    logits = (torch.randn(ROWS, size, generator=generator) * steepness).to(dtype)
    logits[1, : size - 1] = float("-inf")
    logits[2] = 1.5
    logits[3, size // 2] = float("nan")
    noise = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    noise[4], noise[5] = 0.0, 1 - 2**-52
    return logits, noise


def drawn_on_rank(rank: int, _: Any) -> dict[tuple, tuple[torch.Tensor, torch.Tensor]]:
    draws = {}
    for name, (size, width) in SIZES.items():
        first = rank * width
        in_shard = max(0, min(width, size - first))
        for dtype, temperature in DRAWS:
            logits, noise = logits_of(name, dtype)
            # Padding holds anything.
            padded = torch.full((ROWS, width), 1e4, dtype=dtype)
            padded[:, :in_shard] = logits[:, first : first + in_shard]
            shard = VocabularyShard(first, torch.distributed.group.WORLD)
            drawn = max(0, min(in_shard, size - LAST[name] - first))
            draws[name, dtype, temperature] = draw_from_shards(padded, (in_shard, drawn), noise, temperature, shard)
    return draws


@interpreter
def test_draws_from_shards_are_those_from_the_whole(tmp_path):
    ranks = run_on_ranks(drawn_on_rank, None, 2, tmp_path / "mesh")
    for (name, dtype, temperature), (tokens, logprobs) in ranks[0].items():
        assert torch.equal(tokens, ranks[1][name, dtype, temperature][0])
        assert torch.equal(logprobs.view(torch.int32), ranks[1][name, dtype, temperature][1].view(torch.int32))
        num_drawn = SIZES[name][0] - LAST[name]
        expected, their_logprobs = draw_tokens(*logits_of(name, dtype), temperature, num_drawn)
        known = torch.arange(ROWS) != 3
        if LAST[name]:
            known[1] = False  # all tokens that may be drawn have probability 0
        assert torch.equal(tokens[known], expected[known])
        assert (logprobs - their_logprobs)[known].abs().max() <= 1e-6
        assert logprobs[3].isnan()
        assert 0 <= tokens[3] < SIZES[name][0]
    assert ranks[0]["odd", torch.float32, 0.0][0].dtype == torch.int64
    assert ranks[0]["odd", torch.float32, 0.0][1].dtype == torch.float32
