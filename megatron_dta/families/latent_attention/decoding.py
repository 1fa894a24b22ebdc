"""Latent attention of a decoding pass over a paged cache of latents, in plain PyTorch.

Keys and values are not expanded: a query's content times the weight of keys is a query for latents, and the mean of
latents times the weight of values is the output. All heads share the one row of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dta.core.model.decode.decode_context import DecodeContext


def attend_latents(
    context: DecodeContext,
    layer_number: int,
    query: Tensor,
    latents: Tensor,
    weights: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Output [n, H, V] for ``query`` [n, H, K] and the new tokens' ``latents`` [n, 1, L + R], which are stored.

    Args:
        weights: of the keys [H, K - R, L] and of the values [H, V, L].
        scale: factor on the scores.
    """
    size, channels = weights[0].shape[1:]
    of_latents = torch.einsum("nhk,hkl->nhl", query[..., :size], weights[0])
    context.cache.write(layer_number, context.slots, latents, latents[..., :0])
    pages = context.cache.keys[layer_number]
    queries = torch.cat([of_latents, query[..., size:]], dim=-1)
    means = context.attend_pages(queries, pages, pages[..., :channels], scale)
    return torch.einsum("nhl,hvl->nhv", means, weights[1])
