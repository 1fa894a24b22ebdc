"""Computes attention of some queries over a prefix that all of them see, by PyTorch's own kernels: cuDNN's on a GPU.

Libraries are faster than our kernels where there is no mask. The ancestors' part of a segment is mostly such an
unmasked rectangle of queries x keys. Its result is a partial one. Forward: the tree kernel starts from the rectangle's
output and log-sum-exp, as if it had visited those keys itself. Backward: the gradients of the rectangle are computed
with the *merged* output and log-sum-exp. They are exactly its share of the gradients, because the probabilities
exp(score - lse) and delta = rowsum(dO O) are then those of the whole attention.

The rectangle's dK and dV have the inputs' dtype; they are rounded once for each segment, before they are added in
float32.

Legend: n queries, P keys of the rectangle, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def prefix_forward(q_nHD: Tensor, k_PGD: Tensor, v_PGD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [n, H, D] in the inputs' dtype and log-sum-exp [H, n] in float32, both contiguous."""
    q, k, v = _batched(q_nHD), _batched(k_PGD), _batched(v_PGD)
    if q.is_cuda:
        out, lse, *_ = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, scale=scale)
    else:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, *_all_heads(q, k, v), 0.0, False, scale=scale)
    n, H, _ = q_nHD.shape
    return _unbatched(out), lse.reshape(H, n).contiguous()


def prefix_backward(
    grad_out_nHD: Tensor,
    q_nHD: Tensor,
    k_PGD: Tensor,
    v_PGD: Tensor,
    out_nHD: Tensor,
    lse_Hn: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rectangle's share of dQ, dK and dV, contiguous; ``out`` and ``lse`` are those of the whole attention."""
    grad_out, q, k, v, out = (_batched(tensor) for tensor in (grad_out_nHD, q_nHD, k_PGD, v_PGD, out_nHD))
    n, H, _ = q_nHD.shape
    if q.is_cuda:
        lse = lse_Hn.view(1, H, n, 1)
        if _statistics_by_token(H, k.shape[1], q.shape[-1], q.dtype, q.device):
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            lse = lse.contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        gradients = _ATEN._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse, seed, seed, None, None, None, n, k.shape[2], 0.0, False, scale=scale
        )
        return tuple(_unbatched(gradient) for gradient in gradients)
    k_all, v_all = _all_heads(q, k, v)
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k_all, v_all, out, lse_Hn.unsqueeze(0).contiguous(), 0.0, False, scale=scale
    )
    of_groups = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return _unbatched(dq), *(_unbatched(x) for x in of_groups)


@lru_cache
def _statistics_by_token(heads: int, groups: int, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN's log-sum-exp is laid out token by token; this depends on PyTorch's version and is tested once."""
    q, k = (torch.zeros(128, h, head_size, dtype=dtype, device=device) for h in (heads, groups))
    _, lse, *_ = _ATEN._scaled_dot_product_cudnn_attention(_batched(q), _batched(k), _batched(k), None, True)
    return lse.stride(1) == 1 and heads > 1


def _batched(x_nHD: Tensor) -> Tensor:
    """[n, H, D] -> [1, H, n, D]."""
    return x_nHD.transpose(0, 1).unsqueeze(0)


def _unbatched(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1).contiguous()


def _all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
