"""Tree attention in plain PyTorch: the definition that every faster kernel is tested against, and the path on CPUs.

Legend of shape suffixes:
    N  queries (the tokens of one segment)      M  keys (the segment's ancestors, then its own tokens)
    H  query heads      G  key/value heads      R  query heads per key/value head (H / G)      D  head size

Query q sees key k exactly when ``key_index[k] <= query_index[q] < key_end[k]``, where the indices count tokens of the
depth-first stream and ``key_end`` is one past the last token of the key's subtree. This single rule is causal attention
on a chain, variable-length attention on a forest of chains, and tree attention on a tree.

Example: token 0 has the children 1 and 2, so ``key_end = [3, 2, 3]``. Query 2 sees key 0 (0 <= 2 < 3) and itself, but
not key 1, whose subtree ends before it (2 < 2 is false).

Both passes process blocks of queries, which bounds the memory for scores, and compute in at least float32 for any
input. A key that a query does not see has probability exactly zero there, so its value cannot change a bit of the
output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Score elements alive at once: 2^24 float32 numbers are 64 MiB.
SCORE_ELEMENTS = 1 << 24
# Queries of a block on a CPU.
CPU_BLOCK = 128


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over tokens: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tree_attention_forward(
    q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, query_index_N: Tensor, key_index_M: Tensor, key_end_M: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of every query over the keys it sees.

    Args:
        q_NHD, k_MGD, v_MGD: queries, keys and values, H a multiple of G.
        query_index_N, key_index_M, key_end_M: integer stream indices (see the module).
        scale: factor on the scores, usually 1 / sqrt(D).

    Returns:
        ``(out_NHD, lse_HN)``: the output in the queries' dtype and the log-sum-exp of the scaled scores in float32
        (float64 for float64 inputs).

    Every query must see at least one key (in a tree, each sees itself).
    """
    dtype = accumulation_dtype(q_NHD.dtype)
    N, H, _ = q_NHD.shape
    k_GMD, v_GMD = k_MGD.transpose(0, 1).to(dtype), v_MGD.transpose(0, 1).to(dtype)
    out_NHD = torch.empty_like(q_NHD)
    lse_HN = q_NHD.new_empty((H, N), dtype=dtype)
    for block, keys in _blocks(N, H, query_index_N, key_index_M, key_end_M):
        scores_GRBM = _masked_scores(
            q_NHD[block], k_GMD[:, keys], query_index_N[block], key_index_M[keys], key_end_M[keys], scale
        )
        lse_GRB = torch.logsumexp(scores_GRBM, dim=-1)
        probabilities_GRBM = torch.exp(scores_GRBM - lse_GRB[..., None])
        out_GRBD = torch.einsum("grbm,gmd->grbd", probabilities_GRBM, v_GMD[:, keys])
        out_NHD[block] = out_GRBD.flatten(0, 1).transpose(0, 1).to(out_NHD.dtype)
        lse_HN[:, block] = lse_GRB.flatten(0, 1)
    return out_NHD, lse_HN


def tree_attention_backward(
    grad_out_NHD: Tensor, q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, out_NHD: Tensor, lse_HN: Tensor,
    query_index_N: Tensor, key_index_M: Tensor, key_end_M: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``tree_attention_forward``, from its outputs.

    Returns:
        ``(dq_NHD, dk_MGD, dv_MGD)``: dq in the queries' dtype; dk and dv in float32 (float64 for float64 inputs),
        because a shared key collects the gradients of all its descendants and bfloat16 would lose the small ones.
    """
    dtype = accumulation_dtype(q_NHD.dtype)
    N, H, _ = q_NHD.shape
    G = k_MGD.shape[1]
    k_GMD, v_GMD = k_MGD.transpose(0, 1).to(dtype), v_MGD.transpose(0, 1).to(dtype)
    dq_NHD = torch.empty_like(q_NHD)
    dk_GMD, dv_GMD = torch.zeros_like(k_GMD), torch.zeros_like(v_GMD)
    delta_HN = (grad_out_NHD.to(dtype) * out_NHD.to(dtype)).sum(-1).transpose(0, 1)
    for block, keys in _blocks(N, H, query_index_N, key_index_M, key_end_M):
        q_GRBD = _by_group(q_NHD[block], G, dtype)
        grad_out_GRBD = _by_group(grad_out_NHD[block], G, dtype)
        scores_GRBM = _masked_scores(
            q_NHD[block], k_GMD[:, keys], query_index_N[block], key_index_M[keys], key_end_M[keys], scale
        )
        probabilities_GRBM = torch.exp(scores_GRBM - lse_HN[:, block].unflatten(0, (G, H // G))[..., None])
        # Each key occurs once in ``keys``, so adding to the selection loses nothing.
        dv_GMD[:, keys] += torch.einsum("grbm,grbd->gmd", probabilities_GRBM, grad_out_GRBD)
        dscores_GRBM = torch.einsum("grbd,gmd->grbm", grad_out_GRBD, v_GMD[:, keys])
        dscores_GRBM -= delta_HN[:, block].unflatten(0, (G, H // G))[..., None]
        dscores_GRBM *= probabilities_GRBM * scale
        dk_GMD[:, keys] += torch.einsum("grbm,grbd->gmd", dscores_GRBM, q_GRBD)
        dq_GRBD = torch.einsum("grbm,gmd->grbd", dscores_GRBM, k_GMD[:, keys])
        dq_NHD[block] = dq_GRBD.flatten(0, 1).transpose(0, 1).to(dq_NHD.dtype)
    return dq_NHD, dk_GMD.transpose(0, 1), dv_GMD.transpose(0, 1)


def _blocks(
    num_queries: int, num_heads: int, query_index_N: Tensor, key_index_M: Tensor, key_end_M: Tensor
) -> Iterator[tuple[slice, slice | Tensor]]:
    """Blocks of queries, each with the keys that it may see."""
    on_cpu = query_index_N.device.type == "cpu"
    length = max(1, SCORE_ELEMENTS // max(1, num_heads * key_index_M.shape[0]))
    length = min(length, CPU_BLOCK) if on_cpu else length
    for start in range(0, num_queries, length):
        block = slice(start, min(start + length, num_queries))
        keys: slice | Tensor = slice(None)
        if on_cpu:
            first, last = query_index_N[block].aminmax()
            keys = torch.nonzero((key_index_M <= last) & (key_end_M > first)).squeeze(1)
        yield block, keys


def _by_group(x_BHD: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """[B, H, D] -> [G, R, B, D]."""
    return x_BHD.to(dtype).transpose(0, 1).unflatten(0, (num_groups, -1))


def _masked_scores(
    q_BHD: Tensor, k_GMD: Tensor, query_index_B: Tensor, key_index_M: Tensor, key_end_M: Tensor, scale: float
) -> Tensor:
    """Scaled scores [G, R, B, M], minus infinity where the query does not see the key."""
    q_GRBD = _by_group(q_BHD, k_GMD.shape[0], k_GMD.dtype)
    scores_GRBM = torch.einsum("grbd,gmd->grbm", q_GRBD * scale, k_GMD)
    visible_BM = (key_index_M <= query_index_B[:, None]) & (query_index_B[:, None] < key_end_M)
    return scores_GRBM.masked_fill_(~visible_BM, float("-inf"))
