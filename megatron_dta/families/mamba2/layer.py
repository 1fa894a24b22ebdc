"""The Mamba-2 layer, with Megatron's parameters in the layout of its checkpoints.

    in_proj    gate z and input x of all heads, B and C of all groups, dt of each head
    conv1d     one filter with a bias for each channel of x, B and C
    dt_bias, A_log   a step dt = softplus(dt + dt_bias), by which a state decays: h = exp(-exp(A_log) dt) h + dt B x^T
    D          what the output y = C h + D x has of the input
    out_norm   RMSNorm of y silu(z) over the channels of a group
    out_proj

It is a recurrence without the delta rule: C are its queries, B its keys, dt x its values.

Legend: n rows of this rank, N tokens, J heads, P channels of a head.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.recurrence.gated_delta_rule import state_space
from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.model.hybrid.path_states import PathStates
from megatron_dta.core.model.hybrid.recurrent_layer import RecurrentLayer, spec_of, use_recurrence

# Initial steps are drawn between these.
FIRST_STEPS = (1e-3, 0.1)


class Mamba2(RecurrentLayer):
    """Takes the place of ``SelfAttention`` in a layer."""

    recurrence = staticmethod(state_space)

    def initial_vectors(self) -> dict[str, Tensor]:
        low, high = map(math.log, FIRST_STEPS)
        steps = torch.empty(self.sizes.num_heads).uniform_(low, high).exp()
        # The inverse of softplus.
        return super().initial_vectors() | {"dt_bias": steps + torch.log(-torch.expm1(-steps))}

    def recur(
        self, kinds: tuple[Tensor, ...], of_heads: list[Tensor], vectors: list[Tensor], paths: PathStates
    ) -> Tensor:
        (x, b, c), (dt,), (bias, decay, skip) = kinds, of_heads, vectors
        key_size, value_size = self.sizes.head_state
        b, c = (part.unflatten(1, (-1, key_size)) for part in (b, c))
        x, dtype = x.unflatten(1, (-1, value_size)), accumulation_dtype(x.dtype)
        step = F.softplus(dt.to(dtype) + bias.to(dtype))
        values, decays = (x * step.unsqueeze(-1)).to(x.dtype), -decay.to(dtype).exp() * step
        y = paths.recur(self.layer_number, self.recurrence, (c, b, values, decays))
        return (y + skip.to(dtype).unsqueeze(-1) * x).to(x.dtype)

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Output [n, J, P] times ``silu(gate)``, normed by groups."""
        groups = self.sizes.mamba_num_groups // self.tp_size
        return _GroupNorm.apply(out, gate, self.out_norm.weight, groups, self.out_norm.eps)


def _normed(out: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    # The norm divides small outputs, so rounding to float32 on the way would show in the gradients.
    dtype = torch.float64 if out.dtype == torch.float32 else accumulation_dtype(out.dtype)
    x = (out.to(dtype) * F.silu(gate.to(dtype))).flatten(1).unflatten(1, (groups, -1))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * weight.to(dtype)).to(out.dtype).view(out.shape)


class _GroupNorm(torch.autograd.Function):
    """Keeps its inputs only, and computes once more in the backward: half a dozen wide tensors are in between."""

    @staticmethod
    def forward(ctx, out: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        ctx.save_for_backward(out, gate, weight)
        ctx.settings = groups, eps
        return _normed(out, gate, weight, groups, eps)

    @staticmethod
    def backward(ctx, grad: Tensor):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            normed = _normed(*inputs, *ctx.settings)
        return *torch.autograd.grad(normed, inputs, grad), None, None


spec = partial(spec_of, Mamba2)
use_kernels = partial(use_recurrence, name="state_space")
