"""Plain PyTorch references of the fused layer kernels: RMSNorm, QK-norm with rotary positions, SwiGLU.

They compute in float32 (float64 for float64 inputs) and round once, as the kernels do; gradients are autograd's.

Legend: N tokens, C hidden size, G key/value heads, P query heads of a group, D head size, R rotated channels, F width
of the feed-forward layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.tree_attention.reference import accumulation_dtype


def rms_norm(x_NC: Tensor, weight_C: Tensor, eps: float, added_NC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(normed, residual)``, where the residual is ``x`` or ``x + added`` and is rounded before it is normalized."""
    dtype = accumulation_dtype(x_NC.dtype)
    residual = x_NC if added_NC is None else (x_NC.to(dtype) + added_NC.to(dtype)).to(x_NC.dtype)
    return _normed(residual.to(dtype), weight_C.to(dtype), eps).to(x_NC.dtype), residual


def qkv_rope(
    mixed_NW: Tensor, cos_NR: Tensor, sin_NR: Tensor, q_weight_D: Tensor | None, k_weight_D: Tensor | None,
    num_groups: int, heads_per_group: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(q [N, G P, D], k [N, G, D], v [N, G, D])`` of Megatron's ``mixed`` [N, G (P + 2) D]; tables are [N, R / 2]."""
    dtype = accumulation_dtype(mixed_NW.dtype)
    N = mixed_NW.shape[0]
    D = mixed_NW.shape[1] // (num_groups * (heads_per_group + 2))
    heads = mixed_NW.view(N, num_groups, heads_per_group + 2, D)
    q, k, v = heads.split([heads_per_group, 1, 1], dim=2)
    cos, sin = (table.to(dtype)[:, None, None, :] for table in (cos_NR, sin_NR))
    rotated = []
    for x, weight in ((q, q_weight_D), (k, k_weight_D)):
        x = x.to(dtype)
        if weight is not None:
            x = _normed(x, weight.to(dtype), eps)
        half = cos_NR.shape[1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
        rotated.append(turned.to(mixed_NW.dtype).flatten(1, 2))
    return *rotated, v.squeeze(2)


def swiglu(x_NF: Tensor) -> Tensor:
    """``silu(gate) * up`` [N, F] of ``[gate, up]`` [N, 2 F]."""
    gate, up = x_NF.to(accumulation_dtype(x_NF.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x_NF.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
