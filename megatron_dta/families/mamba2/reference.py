"""Reference of Mamba-2: one sequence in one forward, token by token, autograd for everything.

Every formula is written out on Megatron's parameters; nothing but the two projections is shared with the layer.

Legend: T tokens, J heads, P channels of a head, G groups, S size of a state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dta.families.mamba2.layer import Mamba2


class Plain(Mamba2):
    """Mamba-2 for a forward over one whole sequence, in the precision of its parameters."""

    def paths_of(self, context: object) -> None:
        """A whole sequence needs no states."""

    def mix(self, mixed: Tensor, paths: None, num_tokens: int, group: None = None) -> Tensor:
        """Gated output [T, J P] of the rows of ``in_proj``."""
        sizes = self.config.mixer
        heads, groups, width = sizes.mamba_num_heads, sizes.mamba_num_groups, sizes.mamba_conv_kernel
        inner, keys = heads * sizes.mamba_head_dim, groups * sizes.mamba_state_dim
        z, xbc, dt = mixed.split([inner, inner + 2 * keys, heads], dim=1)
        padded = F.pad(xbc, (0, 0, width - 1, 0))
        filtered = sum(padded[w : w + len(xbc)] * self.conv1d.weight[:, 0, w] for w in range(width)) + self.conv1d.bias
        x, b, c = (filtered * filtered.sigmoid()).split([inner, keys, keys], dim=1)
        x = x.view(len(x), heads, sizes.mamba_head_dim)
        b, c = (part.view(len(x), groups, -1).repeat_interleave(heads // groups, dim=1) for part in (b, c))
        step = torch.log1p(torch.exp(dt + self.dt_bias))
        decay = torch.exp(-self.A_log.exp() * step)
        states = torch.zeros_like(b[0].unsqueeze(2) * x[0].unsqueeze(1))
        outputs = []
        for t in range(len(mixed)):
            added = (step[t].unsqueeze(1) * b[t]).unsqueeze(2) * x[t].unsqueeze(1)
            states = decay[t, :, None, None] * states + added
            outputs.append((c[t].unsqueeze(2) * states).sum(1) + self.D.unsqueeze(1) * x[t])
        gated = (torch.stack(outputs).flatten(1) * z * z.sigmoid()).view(len(mixed), groups, -1)
        normed = gated / (gated.square().mean(-1, keepdim=True) + self.out_norm.eps).sqrt()
        return normed.flatten(1) * self.out_norm.weight
