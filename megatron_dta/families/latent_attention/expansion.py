"""The matrix that expands latents into keys and values, and its adapter if it has one.

One product with a row of all inputs gives a head's key: its latent, what the adapter's A makes of it, and its key for
positions, which an identity passes on. Values are padded with zeros to the size of a key.

Legend: n tokens, M keys, H query heads of this rank, h of them, K channels of a query, C of them for content, V of a
value, L of a latent, R of a key for positions; r rank of an adapter; W = L + r + R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient
from megatron_dta.families.latent_attention.sizes import Sizes


class Expansion(NamedTuple):
    """The matrices by heads; gradients of them reach the parameters.

    Attributes:
        weight: the rows for keys without their positions, then for values, [H, C + V, L].
        a: the adapter's A times its scale, [r, L].
        b: the adapter's rows of B, [H, C + V, r].
        buffer: of the weight's gradient, without autograd; None if there is none.
    """

    sizes: Sizes
    weight: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    buffer: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        named = {"weight": self.weight, "a": self.a, "b": self.b}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def _rank(self) -> int:
        return 0 if self.a is None else len(self.a)

    def queries(self, content: Tensor) -> Tensor:
        """Queries for latents [n, H, L] of ``content`` [n, H, C]."""
        rows = slice(self.sizes.qk_head_dim)
        of_latents = torch.einsum("nhk,hkl->nhl", content, self.weight[:, rows])
        return (
            of_latents
            if self.a is None
            else of_latents + torch.einsum("nhk,hkr->nhr", content, self.b[:, rows]) @ self.a
        )

    def outputs(self, means: Tensor) -> Tensor:
        """Values [n, H, V] of ``means`` [n, H, L] of latents."""
        rows = slice(self.sizes.qk_head_dim, None)
        out = torch.einsum("nhl,hvl->nhv", means, self.weight[:, rows])
        return out if self.a is None else out + torch.einsum("nhr,hvr->nhv", means @ self.a.T, self.b[:, rows])

    def groups(self, num_keys: int) -> list[slice]:
        """The heads that are expanded at a time."""
        count, size = len(self.weight), self.weight.element_size()
        heads = self.sizes.heads_at_once(num_keys, count, size)
        return [slice(first, first + heads) for first in range(0, count, heads)]

    def rows(self, latents: Tensor) -> Tensor:
        """The inputs [M, W] of ``latents`` [M, 1, L + R]."""
        if self.a is None:
            return latents.flatten(1)
        latent, position = latents.flatten(1).split([self.sizes.kv_lora_rank, self.sizes.qk_pos_emb_head_dim], dim=1)
        return torch.cat([latent, F.linear(latent, self.a), position], dim=1)

    def matrices(self, heads: slice) -> Tensor:
        """The matrices [2, h, K, W] for keys and values of some heads."""
        sizes, weight = self.sizes, self.weight[heads].detach()
        content, latent, rank = sizes.qk_head_dim, sizes.kv_lora_rank, self._rank
        matrices = weight.new_zeros(2, len(weight), sizes.query_size, sizes.slot + rank)
        matrices[0, :, content:, latent + rank :].diagonal(dim1=1, dim2=2).fill_(1)
        parts = [(weight, slice(latent))]
        if rank:
            parts.append((self.b[heads].detach(), slice(latent, latent + rank)))
        for rows, columns in parts:
            matrices[0, :, :content, columns] = rows[:, :content]
            matrices[1, :, : sizes.v_head_dim, columns] = rows[:, content:]
        return matrices

    # Gradients.

    def sums(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Zeros for the gradients of those tensors that need one, or the weight's buffer."""
        zeros = {name: torch.zeros_like(x, dtype=dtype) for name, x in self.tensors.items() if x.requires_grad}
        return zeros if self.buffer is None else zeros | {"weight": self.buffer}

    def add_matrices(self, sums: dict[str, Tensor], heads: slice, grad: Tensor) -> None:
        """Add the gradient of ``matrices`` [2, h, K, W] to that of their tensors."""
        content, latent = self.sizes.qk_head_dim, self.sizes.kv_lora_rank
        for name, columns in (("weight", slice(latent)), ("b", slice(latent, latent + self._rank))):
            if name in sums:
                of_heads = sums[name][heads]
                of_heads[:, :content] += grad[0, :, :content, columns]
                of_heads[:, content:] += grad[1, :, : self.sizes.v_head_dim, columns]

    def of_latents(self, grad: Tensor, rows: Tensor, sums: dict[str, Tensor]) -> Tensor:
        """The gradient of latents [M, L + R] that ``grad`` of their ``rows`` [M, W] gives."""
        if self.a is None:
            return grad
        latent, inner, position = grad.split([self.sizes.kv_lora_rank, self._rank, self.sizes.qk_pos_emb_head_dim], 1)
        latent, inner = latent.contiguous(), inner.to(rows.dtype)
        add_weight_gradient(latent, inner.t(), self.a.detach())
        if "a" in sums:
            add_weight_gradient(sums["a"], inner, rows[:, : latent.shape[1]])
        return torch.cat([latent, position], dim=1)

    def backward(self, sums: dict[str, Tensor]) -> None:
        """Let the gradients of the tensors reach the parameters."""
        roots = [self.tensors[name] for name in sums]
        # A weight with a buffer has its gradient there; what autograd gets for it is not read.
        grads = [
            x.detach() if x is self.weight and self.buffer is not None else sums[name].to(x.dtype)
            for name, x in zip(sums, roots, strict=True)
        ]
        if roots:
            torch.autograd.backward(roots, grads)
