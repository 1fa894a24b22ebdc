"""Computes the size limit of the in-process engine's K/V cache and its attention heads.

Without a given size the cache may use what is free when sampling starts, less what a forward pass needs besides: its
activations, its logits, the copy of a layer's pages while the cache grows, the states of layers with a recurrence, and
a margin for what is not predicted (buffers of communicators and libraries, CUDA graphs, fragmentation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_dta.core.model.attention.kv_pool import latent_size
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.decode.paged_context import HeadShape
from megatron_dta.core.model.kernel_types import accumulation_dtype
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.sampling.in_process.next_token import most_logit_bytes

_MARGIN_BYTES, _MARGIN_SHARE = 2**30, 0.04
# States reserved per running request: held requests keep theirs, and the number of slots doubles when it grows.
_STATE_SLOTS = 2


def head_shape(model: Model) -> HeadShape:
    """The attention heads of this rank."""
    config = model.config
    size = config.tensor_model_parallel_size
    dtype = next(model.parameters()).dtype
    heads, latent = config.num_attention_heads // size, latent_size(config)
    if latent:
        return HeadShape(heads, 1, latent, dtype, value_size=0)
    return HeadShape(heads, config.num_query_groups // size, config.kv_channels, dtype)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU's memory: free for this process, reserved memory that it does not use included, and in all."""

    free: int
    total: int

    @staticmethod
    def now() -> DeviceMemory:
        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total)

    def cache_bytes(self, pass_bytes: int, num_layers: int) -> int:
        """Bytes left for the cache of ``num_layers`` layers beside passes that need ``pass_bytes``."""
        margin = max(_MARGIN_BYTES, int(_MARGIN_SHARE * self.total))
        # While the cache grows, the old keys or values of one layer exist along with the new ones.
        return max(0, int((self.free - pass_bytes - margin) / (1 + 1 / max(1, 2 * num_layers))))


def pass_bytes(model: Model, num_tokens: int, static: int = 0) -> int:
    """Memory that a pass over ``num_tokens`` tokens needs on a rank besides weights and K/V.

    Args:
        static: tokens of the largest captured pass, which has memory of its own.
    """
    element_size, ranks = next(model.parameters()).element_size(), model.config.tensor_model_parallel_size
    activations = (num_tokens + static) * _layer_width(model) * element_size
    logits = [most_logit_bytes(model.true_vocab_size, element_size, ranks, count) for count in (num_tokens, static)]
    return activations + sum(logits)


def _layer_width(model: Model) -> int:
    """Numbers per token that exist at once in the widest part of a layer."""
    config = model.config
    ranks = config.tensor_model_parallel_size
    heads = config.num_attention_heads * config.kv_channels // ranks
    groups = config.num_query_groups * config.kv_channels // ranks
    # The mixed rows, queries, keys and outputs; both products of a gated feed-forward layer and its activation.
    attention, feed_forward = 3 * heads + 3 * groups, 3 * config.ffn_hidden_size // ranks
    if config.num_moe_experts is not None:
        rows = config.moe_router_topk * (2 * config.hidden_size + 3 * (config.moe_ffn_hidden_size or 0))
        shared = 3 * (config.moe_shared_expert_intermediate_size or 0) // ranks
        feed_forward = max(feed_forward, rows + shared)
    # The residual stream, a branch, their sum and the norm's output.
    return 4 * config.hidden_size + max(attention, feed_forward)


def state_bytes(model: Model) -> int:
    """Bytes of the states of one sequence on this rank."""
    dtype, total = next(model.parameters()).dtype, 0
    for part in model.model_chunks:
        for shape in part.recurrent_layers.values():
            rows = (shape.width - 1) * shape.channels * dtype.itemsize
            total += math.prod(shape.state) * accumulation_dtype(dtype).itemsize + rows
    return total


def max_pages(
    model: Model,
    block_size: int,
    buffer_size_gb: float | None,
    num_tokens: int,
    static: int = 0,
    num_requests: int = 0,
    memory: DeviceMemory | None = None,
) -> int | None:
    """The maximum number of pages of ``block_size`` positions; None: no limit.

    It is the minimum over the ranks of a replica, which must schedule the same passes.

    Args:
        num_tokens, static: see ``pass_bytes``.
        num_requests: running requests, each with a state in layers with a recurrence.
        memory: of the GPU; by default what is free now.
    """
    parameter, shape = next(model.parameters()), head_shape(model)
    layers = len(model.attention_layers)
    budget = None if buffer_size_gb is None else int(buffer_size_gb * 2**30)
    if budget is None and (parameter.is_cuda or memory is not None):
        needed = pass_bytes(model, num_tokens, static) + _STATE_SLOTS * num_requests * state_bytes(model)
        budget = (memory or DeviceMemory.now()).cache_bytes(needed, layers)
    if budget is None:
        return None
    page_bytes = PagedCache.page_bytes(layers, block_size, shape.num_groups, shape.sizes, parameter.dtype)
    # A stage of an uneven pipeline may have no layers.
    rank_pages = budget // page_bytes if page_bytes else None
    pages = min(pages for pages in current_mesh().gather_over_replica(rank_pages) if pages is not None)
    return max(pages, 0)
