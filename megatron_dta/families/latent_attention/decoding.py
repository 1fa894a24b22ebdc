"""Latent attention of a decoding pass over a paged cache of latents, in plain PyTorch.

Keys and values are not expanded: a query's content times the weight of keys is a query for latents, and the mean of
latents times the weight of values is the output. All heads share the one row of a token.

Legend: n new tokens, H query heads of this rank, K channels of a query, V of a value, L of a latent, R of a key for
positions; r rank of an adapter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dta.core.model.decode.decode_context import DecodeContext


class Expansion(NamedTuple):
    """The matrix that expands latents, by heads, and its adapter if it has one.

    Attributes:
        keys, values: the rows for keys without their positions [H, K - R, L] and for values [H, V, L].
        a: the adapter's A times its scale, [r, L].
        b_keys, b_values: the adapter's rows of B, [H, K - R, r] and [H, V, r].
    """

    keys: Tensor
    values: Tensor
    a: Tensor | None = None
    b_keys: Tensor | None = None
    b_values: Tensor | None = None

    def queries(self, content: Tensor) -> Tensor:
        """Queries for latents [n, H, L] of ``content`` [n, H, K - R]."""
        of_latents = torch.einsum("nhk,hkl->nhl", content, self.keys)
        if self.a is None:
            return of_latents
        return of_latents + torch.einsum("nhk,hkr->nhr", content, self.b_keys) @ self.a

    def outputs(self, means: Tensor) -> Tensor:
        """Values [n, H, V] of ``means`` [n, H, L] of latents."""
        out = torch.einsum("nhl,hvl->nhv", means, self.values)
        return out if self.a is None else out + torch.einsum("nhr,hvr->nhv", means @ self.a.T, self.b_values)


def attend_latents(
    context: DecodeContext,
    layer_number: int,
    query: Tensor,
    latents: Tensor,
    expansion: Expansion,
    scale: float,
) -> Tensor:
    """Output [n, H, V] for ``query`` [n, H, K] and the new tokens' ``latents`` [n, 1, L + R], which are stored.

    Args:
        scale: factor on the scores.
    """
    size, channels = expansion.keys.shape[1:]
    of_latents = expansion.queries(query[..., :size])
    context.cache.write(layer_number, context.slots, latents, latents[..., :0])
    pages = context.cache.keys[layer_number]
    queries = torch.cat([of_latents, query[..., size:]], dim=-1)
    means = context.attend_pages(queries, pages, pages[..., :channels], scale)
    return expansion.outputs(means)
