"""References: the gated delta rule token by token, and the short convolution as a sum over each token's predecessors.

Legend: T tokens, H key heads, J value heads (a multiple of H), K and V sizes of their heads, C channels, W width of the
convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.tree_attention.reference import accumulation_dtype

# Added to the sum of squares of a key or a query before its root is taken.
NORM_EPS = 1e-6


def unit_heads(x: Tensor) -> Tensor:
    """``x`` [..., K], divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_rule_by_token(
    q_THK: Tensor, k_THK: Tensor, v_TJV: Tensor, g_TJ: Tensor, beta_TJ: Tensor, entry_JKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, J, V] and last state [J, K, V] of one sequence.

    For each token the state decays by ``exp(g)``. Then the value that it holds for the key moves towards the token's
    value by the share ``beta``, and the query reads the state. Keys and queries are brought to unit length, and queries
    are divided by the root of K.
    """
    dtype = accumulation_dtype(q_THK.dtype)
    q, k, v, g, beta = (x.to(dtype) for x in (q_THK, k_THK, v_TJV, g_TJ, beta_TJ))
    per_key_head = v.shape[1] // k.shape[1]
    q, k = (unit_heads(x).repeat_interleave(per_key_head, dim=1) for x in (q, k))
    state, outputs = entry_JKV.to(dtype), []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        held = torch.einsum("jk,jkv->jv", k[t], state)
        state = state + torch.einsum("jk,jv->jkv", k[t], beta[t][:, None] * (v[t] - held))
        outputs.append(torch.einsum("jk,jkv->jv", q[t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs).to(v_TJV.dtype), state


def short_convolution_by_token(rows_TC: Tensor, weight_CW: Tensor, tail_WC: Tensor) -> tuple[Tensor, Tensor]:
    """``silu`` of the causal convolution of one sequence [T, C], and the last W - 1 rows of the path [W - 1, C].

    Args:
        tail_WC: the W - 1 rows before the first token.
    """
    dtype = accumulation_dtype(rows_TC.dtype)
    width = weight_CW.shape[1]
    path = torch.cat([tail_WC.to(rows_TC.dtype), rows_TC])
    outputs = [(path[t : t + width].to(dtype) * weight_CW.t().to(dtype)).sum(0) for t in range(rows_TC.shape[0])]
    return F.silu(torch.stack(outputs)).to(rows_TC.dtype), path[path.shape[0] - width + 1 :]
