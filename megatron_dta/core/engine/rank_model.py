"""Holds this rank's model chunks together with the settings that every pass uses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from megatron_dta.core.engine.cost_inputs import decoder_shape
from megatron_dta.core.extensions import KVOnHost
from megatron_dta.core.model.attention.kv_pool import SlotShape, latent_size
from megatron_dta.core.model.attention.segment_attention import choose_attention
from megatron_dta.core.model.kernel_types import AttentionShape
from megatron_dta.core.model.parallel.context_group import context_group
from megatron_dta.core.model.parallel.mesh import training_mesh
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.planning.costs.element_bytes import LOGIT_ELEMENTS

if TYPE_CHECKING:
    from megatron_dta.core.model.parallel.staged_model import Model


class RankModel:
    """The model chunks of a rank, with the settings that all passes share.

    Args:
        model: a ``TreeGPTModel`` or ``StagedModel``, or its model chunks in Megatron's DistributedDataParallel.
        temperature: the logits are divided by it, in training as in sampling.
        logprob_chunk_tokens: rows of logits alive at once; None for ``LOGIT_ELEMENTS`` divided by the vocabulary size.
        tree_attention_impl: "auto", "triton" or "reference", see ``TreeConfig``.
        routing_replay: use the experts that the sampler of the rollouts chose.

    Attributes:
        mesh, context_group: the ranks that run the model.
        kv_on_host: memory for the K/V slots of layers on the host; None without offloading.
    """

    def __init__(
        self,
        model: Model | Sequence[torch.nn.Module],
        temperature: float,
        logprob_chunk_tokens: int | None,
        tree_attention_impl: str,
        routing_replay: bool,
    ) -> None:
        self.replays_routing = routing_replay
        self.chunks = list(getattr(model, "model_chunks", model))
        self.tree_models: list[TreeGPTModel] = [
            chunk if isinstance(chunk, TreeGPTModel) else chunk.module for chunk in self.chunks
        ]
        self.config, self.true_vocab_size = self.tree_models[0].config, self.tree_models[0].true_vocab_size
        self.shape = decoder_shape(self.config, self.true_vocab_size)
        self.temperature = temperature
        parameter = next(self.tree_models[0].parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.kv_on_host: KVOnHost | None = None
        most = LOGIT_ELEMENTS[self.device.type] // self.true_vocab_size
        self.logprob_chunk_tokens = logprob_chunk_tokens or max(1, most)
        # Whether attention runs on kernels, rather than in plain PyTorch.
        self.uses_kernels = choose_attention(tree_attention_impl, self.config.kv_channels, self.dtype, self.device)
        self.mesh, self.context_group = training_mesh(), context_group()

    def gradient_sync(self, chunk: int, allowed: bool) -> AbstractContextManager:
        """Keep the backward of a model chunk from starting the reduction of its gradients, unless ``allowed``."""
        part = self.chunks[chunk]
        return nullcontext() if allowed or not hasattr(part, "no_sync") else part.no_sync()

    @property
    def num_heads(self) -> int:
        """Query heads of a layer's attention on this rank."""
        return self.config.num_attention_heads // (self.config.tensor_model_parallel_size * self.mesh.context_size)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer's attention on this rank; context ranks may hold the same one."""
        of_tensor_rank = self.config.num_query_groups // self.config.tensor_model_parallel_size
        return max(1, of_tensor_rank // self.mesh.context_size)

    def attention_shape(self, num_keys: int) -> AttentionShape:
        """What kernels attend with at a time; heads of latent attention take turns on long paths."""
        config, heads, groups = self.config, self.num_heads, self.num_kv_heads
        if latent_size(config):
            heads = groups = config.mixer.heads_at_once(num_keys, heads, self.dtype.itemsize)
        return AttentionShape(heads, groups, config.kv_channels, self.dtype)

    @property
    def slot(self) -> SlotShape:
        """A token's slot in a ``KVPool``."""
        latent, size = latent_size(self.config), self.config.kv_channels
        return SlotShape(1, latent, 0) if latent else SlotShape(self.num_kv_heads, size, size)

    def own_tokens(self, num_tokens: int) -> range:
        """The tokens of a segment of ``num_tokens`` that this rank computes outside the attention."""
        ranks, rank = self.mesh.context_size, self.mesh.context_rank
        rows = self.tree_models[0].rows_of_share(num_tokens, ranks) if ranks > 1 else num_tokens
        return range(min(num_tokens, rank * rows), min(num_tokens, (rank + 1) * rows))

    @property
    def syncs_in_backward(self) -> bool:
        """Whether the gradients of replicas are reduced within the last backward, rather than after it."""
        part = self.chunks[0]
        return hasattr(part, "ddp_config") and part.ddp_config.overlap_grad_reduce
