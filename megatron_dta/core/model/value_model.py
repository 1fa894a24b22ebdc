"""The critic: a model like the policy that returns one number for each token instead of logits.

The value of an edge parent -> child is the value of the state before the child is taken, so it belongs to the parent's
row, and several children of a token share it. The engine asks its model for one number per edge and distributes it to
every (sequence, token) pair through the edge; for a critic this number is the value. The engine therefore handles
values exactly as logprobs, on the same plan, and its pass for logprobs computes values.

The head is a linear map without bias in the accumulation precision. Under tensor parallelism each rank holds the
weights of a part of the hidden channels. The gradients of the ranks by the hidden states are parts of a sum, as with a
vocabulary head, and Megatron's mappings before the head compute the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from dta_kernels.logprobs.linear import RowChunk
from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.model.tree_model import TreeGPTModel


class ValueHead(torch.nn.Module):
    """Hidden states [n, C] -> values [n]. The weight is [1, C over the ranks of a tensor group]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        ranks, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        # All weights are drawn, so that a random state gives the same head on any number of ranks.
        weight = torch.empty(1, config.hidden_size, dtype=torch.float32)
        config.init_method(weight)
        self.part = config.hidden_size // ranks
        self.begin = rank * self.part
        columns = weight[:, self.begin : self.begin + self.part].to(config.params_dtype)
        self.weight = torch.nn.Parameter(columns.clone())
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, is_parallel=ranks > 1, dim=1, stride=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [n] in the accumulation precision, the same on every rank of a tensor group."""
        dtype = accumulation_dtype(hidden.dtype)
        columns = hidden[:, self.begin : self.begin + self.part].to(dtype)
        partial = columns @ self.weight[0].to(dtype)
        if self.part == hidden.shape[1]:
            return partial
        return tensor_parallel.reduce_from_tensor_model_parallel_region(partial)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """This rank's shard of the weight for Megatron's distributed checkpoints."""
        weights = self.state_dict(keep_vars=True)  # the optimizer finds its parameters by identity
        return make_sharded_tensors_for_checkpoint(weights, prefix, {"weight": 1}, sharded_offsets)


class TreeValueModel(TreeGPTModel):
    """A ``TreeGPTModel`` whose output layer is a ``ValueHead``; built without tied embeddings."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.output_layer = ValueHead(config)

    def edge_logprobs(
        self, hidden: Tensor, edge_row: Tensor, target: Tensor, chunks: list[RowChunk], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Value of every edge, and 0 as the entropy of every row of ``hidden``."""
        values = self.output_layer(hidden)
        return values.index_select(0, edge_row), values.detach().new_zeros(hidden.shape[0])
