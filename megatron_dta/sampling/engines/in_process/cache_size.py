"""Computes the size limit of the in-process engine's K/V cache and its attention heads."""

from __future__ import annotations

import torch

from megatron_dta.model import Model, current_mesh
from megatron_dta.model.attention.paged_cache import PagedCache
from megatron_dta.model.attention.paged_context import HeadShape

# Without a budget, the share of the GPU memory free at the start of a phase that may become K/V. Activations, logits
# and the copy of a layer's pages when the pool grows need the rest.
_SHARE_OF_FREE_MEMORY = 0.5


def head_shape(model: Model) -> HeadShape:
    """The attention heads of this rank."""
    config = model.config
    size = config.tensor_model_parallel_size
    dtype = next(model.parameters()).dtype
    return HeadShape(config.num_attention_heads // size, config.num_query_groups // size, config.kv_channels, dtype)


def max_pages(model: Model, shape: HeadShape, block_size: int, buffer_size_gb: float | None) -> int | None:
    """The maximum number of pages of ``block_size`` positions; None: no limit.

    It is the minimum over the ranks of a replica, which must schedule alike.
    """
    parameter = next(model.parameters())
    budget = None if buffer_size_gb is None else int(buffer_size_gb * 2**30)
    if budget is None and parameter.is_cuda:
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        budget = int(_SHARE_OF_FREE_MEMORY * (torch.cuda.mem_get_info()[0] + unused))
    if budget is None:
        return None
    layers = len(model.layer_numbers)
    page_bytes = PagedCache.page_bytes(layers, block_size, shape.num_groups, shape.head_size, parameter.dtype)
    # A stage of an uneven pipeline may have no layers.
    own = budget // page_bytes if page_bytes else None
    pages = min(pages for pages in current_mesh().gather_over_replica(own) if pages is not None)
    return max(pages, 0)
