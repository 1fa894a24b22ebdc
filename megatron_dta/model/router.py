"""The router of a mixture-of-experts layer: Megatron's, exact in the model's own precision and aware of the tree.

Megatron's router computes scores in float32 whatever the model's dtype, draws its auxiliary losses from whatever one
forward holds, and routes a recomputed forward anew. This one takes its place through the layer spec. Weights, gating
product, group-limited choice and the dispatchers stay Megatron's. It differs in this:

- scores are computed in float32, and in float64 where the logits are float64;
- the experts that a pass chose are kept with the pass (``TokenRouting``): a recomputed forward uses the very same, and
  rollouts may bring them;
- the balancing loss, the z-loss and the loads of the loss-free balance count a token once for every sequence through
  it, so they are those of training each sequence alone, however the tree is cut.

Legend: N tokens of the pass on this rank, E experts, K experts a token is routed to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class TreeRouter(TopKRouter):
    """Top-k routing; parameters and buffers are those of Megatron's ``TopKRouter``."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits. Megatron's product names a function of Transformer Engine's even where that is not installed."""
        if hasattr(moe_utils, "te_general_gemm"):
            return super().gating(input)
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [N, E], 0 where a token does not go, and the bool map [N, E] of where it goes."""
        self._maintain_float32_expert_bias()
        logits_NE = self.gating(input).reshape(-1, self.config.num_moe_experts)
        with torch.no_grad():
            chosen_NK = choose_experts(logits_NE, self.expert_bias, self.config)
        return routing_weights(logits_NE, chosen_NK, self.config)


class RoutedLayer(TransformerLayer):
    """Megatron's transformer layer, which tells its router whose tokens it routes.

    The core attention gets the pass's context as an argument, also when a layer is recomputed; the layer with experts
    does not, so it is handed over here.
    """

    def forward(self, *args: object, **kwargs: object) -> object:
        self.mlp.router.context = kwargs.get("packed_seq_params")
        return super().forward(*args, **kwargs)


def _scoring(logits_NE: Tensor) -> Tensor:
    return logits_NE if logits_NE.dtype == torch.float64 else logits_NE.float()


def choose_experts(logits_NE: Tensor, expert_bias_E: Tensor | None, config: TransformerConfig) -> Tensor:
    """The experts [N, K] that each token is routed to."""
    scores_NE = _scoring(logits_NE)
    if config.moe_router_score_function == "sigmoid":
        scores_NE = torch.sigmoid(scores_NE)
        if expert_bias_E is not None:
            scores_NE = scores_NE + expert_bias_E
    elif config.moe_router_pre_softmax:
        scores_NE = torch.softmax(scores_NE, dim=-1)
    if config.moe_router_group_topk:
        return group_limited_topk(
            scores_NE,
            config.moe_router_topk,
            *scores_NE.shape,
            config.moe_router_num_groups,
            config.moe_router_group_topk,
        )[1]
    return torch.topk(scores_NE, k=config.moe_router_topk, dim=-1)[1]


def routing_weights(logits_NE: Tensor, chosen_NK: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Weights and map [N, E] of the ``chosen`` experts, by Megatron's rules."""
    scores_NE = _scoring(logits_NE)
    if config.moe_router_score_function == "sigmoid":
        weights_NK = torch.sigmoid(scores_NE).gather(1, chosen_NK)
        if config.moe_router_topk > 1:
            weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
    elif config.moe_router_pre_softmax:
        weights_NK = torch.softmax(scores_NE, dim=-1).gather(1, chosen_NK)
    else:
        weights_NK = torch.softmax(scores_NE.gather(1, chosen_NK), dim=-1)
    weights_NK = weights_NK.type_as(logits_NE)
    if config.moe_router_topk_scaling_factor:
        weights_NK = weights_NK * config.moe_router_topk_scaling_factor
    weights_NE = torch.zeros_like(logits_NE).scatter(1, chosen_NK, weights_NK)
    map_NE = torch.zeros_like(logits_NE, dtype=torch.bool).scatter(1, chosen_NK, True)
    return weights_NE, map_NE
