"""Latent attention of a decoding pass over a paged cache of latents, in plain PyTorch.

Keys and values are not expanded: a query's content times the weight of keys is a query for latents, and the mean of
latents times the weight of values is the output. All heads share the one row of a token.

Legend: n new tokens, H query heads of this rank, K channels of a query, V of a value, L of a latent, R of a key for
positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dta.core.model.decode.decode_context import DecodeContext
from megatron_dta.families.latent_attention.expansion import Expansion


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
    size, channels = expansion.sizes.qk_head_dim, expansion.sizes.kv_lora_rank
    of_latents = expansion.queries(query[..., :size])
    context.cache.write(layer_number, context.slots, latents, latents[..., :0])
    pages = context.cache.keys[layer_number]
    queries = torch.cat([of_latents, query[..., size:]], dim=-1)
    means = context.attend_pages(queries, pages, pages[..., :channels], scale)
    return expansion.outputs(means)
