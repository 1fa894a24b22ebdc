"""The matrix that expands latents into keys and values, by heads, and its adapter if it has one.

A *row* is a latent, what the adapter's A makes of it, and a key for positions, which an identity passes on. One product
with rows gives keys, one gives values, which are padded with zeros to the size of a key.

Legend: n tokens, M keys, H query heads of this rank, h of them, K channels of a query, C of them for content, V of a
value, L of a latent, R of a key for positions; r rank of an adapter; W = L + r + R.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient
from megatron_dta.families.latent_attention.sizes import Sizes

Named = dict[str, Tensor]


class Expansion(NamedTuple):
    """
    Attributes:
        tensors: "weight" [H, C + V, L]; of an adapter "b" [H, C + V, r], and "a" [r, L], its A times its scale.
        buffer: to which the weight's gradient is added without autograd; None if there is none.
    """

    sizes: Sizes
    tensors: Named
    buffer: Tensor | None = None

    def queries(self, content: Tensor) -> Tensor:
        """Queries for latents [n, H, L] of ``content`` [n, H, C]."""
        weight, *adapter = (self.tensors[name][:, : content.shape[2]] for name in self.tensors if name != "a")
        out = torch.einsum("nhk,hkl->nhl", content, weight)
        return out + torch.einsum("nhk,hkr->nhr", content, *adapter) @ self.tensors["a"] if adapter else out

    def outputs(self, means: Tensor) -> Tensor:
        """Values [n, H, V] of ``means`` [n, H, L] of latents."""
        weight, *adapter = (self.tensors[name][:, self.sizes.qk_head_dim :] for name in self.tensors if name != "a")
        out = torch.einsum("nhl,hvl->nhv", means, weight)
        return out + torch.einsum("nhr,hvr->nhv", means @ self.tensors["a"].T, *adapter) if adapter else out

    def groups(self, num_keys: int) -> list[slice]:
        """The heads that are expanded at a time."""
        count = len(self.tensors["weight"])
        heads = self.sizes.heads_at_once(num_keys, count, self.tensors["weight"].element_size())
        return [slice(first, first + heads) for first in range(0, count, heads)]

    def rows(self, latents: Tensor) -> Tensor:
        """The rows [M, W] of ``latents`` [M, 1, L + R]."""
        if "a" not in self.tensors:
            return latents.flatten(1)
        latent, position = latents.flatten(1).tensor_split([self.sizes.kv_lora_rank], dim=1)
        return torch.cat([latent, F.linear(latent, self.tensors["a"]), position], dim=1)

    def matrices(self, heads: slice) -> Tensor:
        """The matrices [2, h, K, W] for keys and values of some heads."""
        weight, sizes, rank = self.tensors["weight"][heads], self.sizes, len(self.tensors.get("a", ()))
        matrices = weight.new_zeros(2, len(weight), sizes.query_size, sizes.slot + rank)
        matrices[0, :, sizes.qk_head_dim :, sizes.kv_lora_rank + rank :].diagonal(dim1=1, dim2=2).fill_(1)
        for part, tensor in self._parts(matrices, self.tensors, heads):
            part.copy_(tensor)
        return matrices

    def sums(self, dtype: torch.dtype) -> Named:
        """Zeros for the gradients of those tensors that need one, or the weight's buffer."""
        zeros = {name: torch.zeros_like(x, dtype=dtype) for name, x in self.tensors.items() if x.requires_grad}
        return zeros if self.buffer is None else zeros | {"weight": self.buffer}

    def add_matrices(self, sums: Named, heads: slice, grad: Tensor) -> None:
        """Add the gradient of ``matrices`` [2, h, K, W]."""
        for part, total in self._parts(grad, sums, heads):
            total += part

    def of_latents(self, grad: Tensor, rows: Tensor, sums: Named) -> Tensor:
        """The gradient of latents [M, 1, L + R] by that of their ``rows`` [M, W]; adds that of A."""
        if "a" in self.tensors:
            rank, size = self.tensors["a"].shape
            latent, inner, position = (x.contiguous() for x in grad.tensor_split([size, size + rank], dim=1))
            inner = inner.to(rows.dtype)
            add_weight_gradient(latent, inner.t(), self.tensors["a"].detach())
            if "a" in sums:
                add_weight_gradient(sums["a"], inner, rows[:, :size])
            grad = torch.cat([latent, position], dim=1)
        return grad.unsqueeze(1)

    def backward(self, sums: Named) -> None:
        """Let the gradients of the tensors reach the parameters."""
        tensors = [self.tensors[name] for name in sums]
        # A weight with a buffer has its gradient there; what autograd gets for it is not read.
        grads = [x.detach() if total is self.buffer else total.to(x.dtype)
                 for x, total in zip(tensors, sums.values(), strict=True)]  # fmt: skip
        if sums:
            torch.autograd.backward(tensors, grads)

    def _parts(self, matrices: Tensor, tensors: Named, heads: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of matrices [2, h, K, W], each with that of the tensors which it is of."""
        content, latent, rank = self.sizes.qk_head_dim, self.sizes.kv_lora_rank, len(self.tensors.get("a", ()))
        for name, columns in (("weight", slice(latent)), ("b", slice(latent, latent + rank))):
            if name in tensors:
                of_heads = tensors[name][heads]
                yield matrices[0, :, :content, columns], of_heads[:, :content]
                yield matrices[1, :, : self.sizes.v_head_dim, columns], of_heads[:, content:]


def expanded(rows: Tensor, matrices: Tensor) -> list[Tensor]:
    """Keys and values [M, h, K] of ``rows`` [M, W] by ``matrices`` [2, h, K, W]."""
    return [F.linear(rows, matrix.flatten(0, 1)).view(len(rows), *matrix.shape[:2]) for matrix in matrices]
