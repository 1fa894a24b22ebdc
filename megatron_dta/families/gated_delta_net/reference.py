"""Reference of gated delta net: one sequence in one forward, token by token, autograd for everything.

Every formula is written out on Megatron's parameters; nothing but the two projections is shared with the layer.

Legend: T tokens, J value heads, K and V sizes of key and value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dta.families.gated_delta_net.layer import GatedDeltaNet


class Plain(GatedDeltaNet):
    """Gated delta net for a forward over one whole sequence, in the precision of its parameters."""

    def paths_of(self, context: object) -> None:
        """A whole sequence needs no states."""

    def mix(self, mixed: Tensor, paths: None, num_tokens: int, group: None = None) -> Tensor:
        """Gated output [T, J V] of the rows of ``in_proj``."""
        config = self.config.mixer
        heads, sizes = config.linear_num_key_heads, config.linear_key_head_dim
        keys, values = heads * sizes, config.linear_num_value_heads * config.linear_value_head_dim
        qkv, z, beta, alpha = mixed.split([2 * keys + values, values] + 2 * [config.linear_num_value_heads], dim=1)
        width = config.linear_conv_kernel_dim
        padded = F.pad(qkv, (0, 0, width - 1, 0))
        filtered = sum(padded[w : w + len(qkv)] * self.conv1d.weight[:, 0, w] for w in range(width))
        q, k, v = (filtered * filtered.sigmoid()).split([keys, keys, values], dim=1)
        shared = config.linear_num_value_heads // heads
        q, k = (self._unit(x.view(-1, heads, sizes)).repeat_interleave(shared, dim=1) for x in (q, k))
        v, z = (x.view(len(x), -1, config.linear_value_head_dim) for x in (v, z))
        decay = torch.exp(-self.A_log.exp() * torch.log1p(torch.exp(alpha + self.dt_bias)))
        states = torch.zeros_like(k[0].unsqueeze(2) * v[0].unsqueeze(1))
        outputs = []
        for t in range(len(mixed)):
            states = decay[t, :, None, None] * states
            error = v[t] - (k[t].unsqueeze(2) * states).sum(1)
            states = states + k[t].unsqueeze(2) * (beta[t].sigmoid().unsqueeze(1) * error).unsqueeze(1)
            outputs.append((q[t].unsqueeze(2) * states).sum(1) / sizes**0.5)
        out = torch.stack(outputs)
        normed = out / (out.square().mean(-1, keepdim=True) + self.out_norm.eps).sqrt() * self.out_norm.weight
        return (normed * z * z.sigmoid()).flatten(1)

    @staticmethod
    def _unit(x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
