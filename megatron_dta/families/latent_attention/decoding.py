"""Latent attention of a decoding pass over a paged cache of latents, in plain PyTorch.

Keys and values are not expanded: a query's content times the weight of keys is a query for latents, and the mean of
latents times the weight of values is the output. All heads share the one row of a token.

Rows of one token each gather their latents once, for two products that add in at least float32; a pass of Moonlight
over 64 rows of 640 tokens so moves 4.5 GiB of latents besides 29 GiB of weights. Longer runs, such as prompts, take
PyTorch's attention, which gathers keys and values, the same numbers.

Legend: n new tokens, H query heads of this rank, K channels of a query, V of a value, L of a latent, R of a key for
positions; B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.model.decode.decode_context import DecodeContext, RowGroup, attend_group
from megatron_dta.families.latent_attention.expansion import Expansion


def attend_latents(
    context: DecodeContext, layer_number: int, query: Tensor, latents: Tensor, expansion: Expansion, scale: float
) -> Tensor:
    """Output [n, H, V] for ``query`` [n, H, K] and the new tokens' ``latents`` [n, 1, L + R], which are stored.

    Args:
        scale: factor on the scores.
    """
    size, channels = expansion.sizes.qk_head_dim, expansion.sizes.kv_lora_rank
    of_latents = expansion.queries(query[..., :size])
    # All rows are written first, because a row may read tokens that another row of this pass has just computed.
    context.cache.write(layer_number, context.slots, latents, latents[..., :0])
    pages = context.cache.keys[layer_number]
    queries, means = torch.cat([of_latents, query[..., size:]], dim=-1), []
    for group in context.groups:
        if group.run == 1:
            means.append(_attend_rows(group, queries[group.tokens], pages, channels, scale))
        else:
            means.append(attend_group(group, queries[group.tokens], pages, pages[..., :channels], scale))
    return expansion.outputs(means[0] if len(means) == 1 else torch.cat(means))


def _attend_rows(group: RowGroup, queries: Tensor, pages: Tensor, channels: int, scale: float) -> Tensor:
    """Means [B, H, L] of latents for ``queries`` [B, H, L + R], one token a row."""
    of_rows = pages.index_select(0, group.pages.flatten()).view(len(group.pages), -1, pages.shape[-1])
    rows, dtype = of_rows[:, : group.end], accumulation_dtype(queries.dtype)
    if queries.is_cuda and queries.dtype != dtype and "dtype" in torch.ops.aten.bmm.overloads():
        scores = torch.bmm(queries, rows.transpose(1, 2), out_dtype=dtype) * scale
    else:
        scores = torch.bmm(queries.to(dtype), rows.to(dtype).transpose(1, 2)) * scale
    if group.visible is not None:
        scores.masked_fill_(~group.visible.squeeze(1), float("-inf"))
    return torch.bmm(scores.softmax(-1).to(queries.dtype), rows[..., :channels])
