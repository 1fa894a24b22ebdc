"""The gated delta rule (Yang et al., arXiv:2412.06464) and Mamba-2 (Dao and Gu, arXiv:2405.21060) over runs of tokens,
chunk by chunk in plain PyTorch.

Inside a chunk of C tokens, the tokens' effects on each other are a triangular system, which is solved for all chunks at
once. Only the state passes from chunk to chunk, so the loop has as many turns as the longest run has chunks. With G the
sum of g up to a token of the chunk, and E_ij = exp(G_i - G_j) for j <= i:

    A = beta_i E_ij (k_i k_j), j < i          pulls between the chunk's own tokens
    U = (1 + A)^-1 (beta v)                   their corrections of the state, for a state of zero
    D = (1 + A)^-1 (beta exp(G) k)            what a state S takes away from them: U - D S
    O = exp(G) q S + (E_ij q_i k_j) (U - D S) outputs
    S' = exp(G_C) S + (exp(G_C - G) k)^T (U - D S)

Mamba-2 (``state_space``) has no beta and corrects nothing: U = v and D = 0.

``library.py`` in this folder runs the same on a GPU. ``reference.gated_delta_rule_by_token`` is the definition.

Legend: T tokens, R runs, B chunks of all runs, C tokens of a chunk, H key heads, J value heads, K and V sizes of heads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dta_kernels.recurrence.contract import CHUNK, Runs
from dta_kernels.recurrence.reference import unit_heads
from dta_kernels.tree_attention.reference import accumulation_dtype


def gated_delta_rule(inputs: tuple[Tensor, ...], entry_RJKV: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """``(output [T, J, V], exits [R, J, K, V])``; a ``contract.Recurrence``.

    Args:
        inputs: queries and keys [T, H, K] of any length, values [T, J, V], decay g [T, J] (at most 0), beta [T, J].
            Without beta it is Mamba-2: the state decays by ``exp(g)`` and gets ``k v^T``, then the query reads it;
            queries C, keys B, values dt x and decay dt A.
        entry_RJKV: states before each run, in at least float32.
    """
    q_THK, k_THK, v_TJV = inputs[:3]
    dtype, device = accumulation_dtype(q_THK.dtype), q_THK.device
    order, active, token = (torch.from_numpy(x) if x.ndim else x for x in _chunks(runs.lengths))
    per_key_head = v_TJV.shape[1] // k_THK.shape[1]
    # [B, J, C, ...]; rows past the end of a run are zeros and change nothing.
    q, k, v, g, *rest = (_by_chunk(x, token.to(device)).to(dtype) for x in inputs)
    if rest:
        q, k = unit_heads(q) * q.shape[-1] ** -0.5, unit_heads(k)
    q, k = (x.repeat_interleave(per_key_head, dim=1) for x in (q, k))
    # Under strong decay the sums are large and their differences small, which float32 would not resolve.
    total = g.double().cumsum(-1)
    seen = torch.ones(token.shape[1], token.shape[1], dtype=torch.bool, device=device).tril()
    # The exponent is at most 0 where it is used; elsewhere it could overflow.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp().to(dtype)
    kept = total.exp().to(dtype)
    update, removal = v, None
    if rest:
        beta = rest[0]
        pulls = (beta.unsqueeze(-1) * (k @ k.transpose(-1, -2)) * decay).tril(-1)
        right = torch.cat([beta.unsqueeze(-1) * v, (beta * kept).unsqueeze(-1) * k], dim=-1)
        solved = torch.linalg.solve_triangular(pulls, right, upper=False, unitriangular=True)
        update, removal = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * decay
    reads = q * kept.unsqueeze(-1)
    last = total[..., -1:]
    writes = (k * (last - total).exp().to(dtype).unsqueeze(-1)).transpose(-1, -2)
    fade = last.exp().to(dtype).unsqueeze(-1)

    order = order.to(device)
    state, outputs, first = entry_RJKV.to(dtype).index_select(0, order), [], 0
    for count in active.tolist():
        here, entered = slice(first, first + count), state[:count]
        change = update[here] if removal is None else update[here] - removal[here] @ entered
        outputs.append(reads[here] @ entered + scores[here] @ change)
        left = fade[here] * entered + writes[here] @ change
        state = left if count == state.shape[0] else torch.cat([left, state[count:]])
        first += count
    # Back to [T, J, V] and to the order of the runs.
    rows = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    position = torch.empty(token.numel() + 1, dtype=torch.int64)
    position[token.flatten()] = torch.arange(token.numel())
    output = rows.index_select(0, position[: q_THK.shape[0]].to(device))
    return output.to(v_TJV.dtype), state.index_select(0, order.argsort()).to(entry_RJKV.dtype)


state_space = gated_delta_rule


def _chunks(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How runs are cut into chunks.

    Returns:
        (runs by descending number of chunks, int64 [R]; for each turn, the number of runs that have a chunk in it; for
        each chunk, its tokens, int64 [B, C], T where a chunk has none). Chunks are ordered by turn, then by run.
    """
    length = np.asarray(lengths, dtype=np.int64)
    begin = np.cumsum(length) - length
    size = min(CHUNK, 1 << int(length.max() - 1).bit_length())
    count = -(-length // size)
    order = np.argsort(-count, kind="stable")
    active = (count[None, :] > np.arange(count.max())[:, None]).sum(1)
    turn = np.repeat(np.arange(len(active)), active)
    run = order[np.concatenate([np.arange(number) for number in active])]
    within = turn[:, None] * size + np.arange(size)
    token = np.where(within < length[run, None], begin[run, None] + within, length.sum())
    return order, active, token


def _by_chunk(x: Tensor, token: Tensor) -> Tensor:
    """``x`` [T, heads, ...] as [B, heads, C, ...]; token T is a row of zeros."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, token.flatten()).view(*token.shape, *x.shape[1:]).transpose(1, 2)
