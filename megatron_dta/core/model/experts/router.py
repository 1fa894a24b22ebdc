"""Routes tokens to experts: Megatron's router, exact in the model's own precision and aware of the tree.

Megatron's router computes scores in float32 for every model dtype, computes its auxiliary losses from the tokens of one
forward, and routes a recomputed forward again. This router replaces it through the layer spec. Weights, gating product
and group-limited choice stay Megatron's. The differences are:

- Scores are computed in float32, and in float64 if the logits are float64.
- The experts chosen in a pass are stored with the pass (``TokenRouting``). A recomputed forward uses the same experts,
  and rollouts may supply them.
- The result has the shape [N, K], for ``expert_rows``, instead of a map over all experts.
- The balancing loss, the z-loss and the loads of the loss-free balance count a token once for every sequence through
  it. They equal those of training each sequence alone and do not depend on how the tree is cut.

Legend: N tokens of the pass on this rank, E experts, K experts of each token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dta_kernels.invariant.products import InvariantProduct, is_batch_invariant
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.attention.token_routing import TokenRouting, rows_of


class TreeRouter(TopKRouter):
    """Top-k routing; parameters and buffers are those of Megatron's ``TopKRouter``.

    Attributes:
        context: the pass that the layer is running.
    """

    context: AttentionContext | None = None

    def gating(self, input: Tensor) -> Tensor:
        """Logits; overridden because Megatron's product needs the name of a Transformer Engine function in any case."""
        if is_batch_invariant():
            return InvariantProduct.apply(input, self.weight.to(input.dtype))
        if hasattr(moe_utils, "te_general_gemm"):
            return super().gating(input)
        dtype = input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [N, K] and experts [N, K] of each token."""
        logits_NE = self.gating(input).reshape(-1, self.config.num_moe_experts)
        return self.route(logits_NE, None if self.context is None else self.context.routing)

    def route(self, logits_NE: Tensor, routing: TokenRouting | None) -> tuple[Tensor, Tensor]:
        """``forward``, given the logits of the tokens."""
        self._maintain_float32_expert_bias()
        if routing is None:
            chosen_NK = choose_experts(logits_NE, self.expert_bias, self.config)
            return routing_weights(logits_NE, chosen_NK, self.config), chosen_NK
        if self.layer_number not in routing.chosen:
            self._choose(logits_NE.detach(), routing)
        chosen_NK = routing.chosen[self.layer_number].long()
        if torch.is_grad_enabled() and routing.z_weights is not None:
            logits_NE = _ZLoss.apply(logits_NE, self._rows(routing.z_weights, len(logits_NE), routing), routing)
        weights_NK = routing_weights(logits_NE, chosen_NK, self.config)
        if torch.is_grad_enabled() and routing.balance is not None:
            scores_NE = balanced_scores(logits_NE, self.config)
            weights_NK = _BalancingLoss.apply(weights_NK, scores_NE, self, routing)
        return weights_NK, chosen_NK

    @torch.no_grad()
    def _choose(self, logits_NE: Tensor, routing: TokenRouting) -> None:
        """In the first forward of the pass, store the experts and count their loads."""
        chosen_NK = choose_experts(logits_NE, self.expert_bias, self.config)
        if routing.replay is not None:
            replayed_NK = self._rows(routing.replay[:, self.expert_layer], len(logits_NE), routing, fill=-1)
            chosen_NK = torch.where(replayed_NK >= 0, replayed_NK.long(), chosen_NK)
        routing.chosen[self.layer_number] = chosen_NK.to(torch.int16)
        if routing.balance is not None:
            best_NK = balanced_scores(logits_NE, self.config).topk(self.topk, dim=-1)[1]
            routing.balanced[self.layer_number] = best_NK.to(torch.int16)
        if self.enable_expert_bias and routing.multiplicity is not None:
            counts_N = self._rows(routing.multiplicity, len(logits_NE), routing).float()
            counts_NK = counts_N.unsqueeze(1).expand_as(chosen_NK)
            self.local_tokens_per_expert.index_add_(0, chosen_NK.flatten(), counts_NK.flatten())

    def _maintain_float32_expert_bias(self) -> None:
        """Keep biases and counts in float32 when the model is converted: bfloat16 would lose counts."""
        super()._maintain_float32_expert_bias()
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert.data = self.local_tokens_per_expert.data.float()

    @property
    def expert_layer(self) -> int:
        """Number of layers with experts before this one."""
        return sum(self.config.moe_layer_freq[: self.layer_number - 1])

    def _rows(self, values: Tensor, num_rows: int, routing: TokenRouting, fill: int = 0) -> Tensor:
        ranks, rank = (self.tp_group.size(), self.tp_group.rank()) if self.config.sequence_parallel else (1, 0)
        return rows_of(values, routing.context_rank * ranks + rank, num_rows, fill)


class _ZLoss(torch.autograd.Function):
    """Returns the logits unchanged; the backward adds the gradient of the z-loss (ST-MoE, arXiv 2202.08906)."""

    @staticmethod
    def forward(ctx, logits_NE: Tensor, weights_N: Tensor, routing: TokenRouting) -> Tensor:
        ctx.save_for_backward(logits_NE, weights_N)
        ctx.routing = routing
        return logits_NE.view_as(logits_NE)

    @staticmethod
    def backward(ctx, grad_NE: Tensor):
        logits_NE, weights_N = ctx.saved_tensors
        logits_NE = _scoring(logits_NE)
        lse_N = torch.logsumexp(logits_NE, dim=-1)
        ctx.routing.add_loss("z_loss", (weights_N * lse_N.square()).sum())
        own_NE = torch.softmax(logits_NE, dim=-1) * (2 * weights_N * lse_N).unsqueeze(1)
        return grad_NE + own_NE.type_as(grad_NE), None, None


class _BalancingLoss(torch.autograd.Function):
    """Returns the weights unchanged; the scores get the gradient of the step's balancing loss.

    This gradient depends on the experts of whole sequences. They are known when the backward runs, because every
    sequence through a segment has then run forward to its end.
    """

    @staticmethod
    def forward(ctx, weights_NK: Tensor, scores_NE: Tensor, router: TreeRouter, routing: TokenRouting) -> Tensor:
        ctx.save_for_backward(scores_NE)
        ctx.router, ctx.routing = router, routing
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx, grad_NK: Tensor):
        (scores_NE,) = ctx.saved_tensors
        own_NE = ctx.router._rows(ctx.routing.balance(ctx.router.layer_number), len(scores_NE), ctx.routing)
        ctx.routing.add_loss("seq_load_balancing_loss", (own_NE * scores_NE).sum())
        return grad_NK, own_NE.type_as(scores_NE), None, None


def keep_balance_in_float32(model: torch.nn.Module) -> None:
    """Convert the routers' biases and counts back to float32 after ``model`` was converted to another dtype."""
    for module in model.modules():
        if isinstance(module, TreeRouter):
            module._maintain_float32_expert_bias()


def _scoring(logits_NE: Tensor) -> Tensor:
    return logits_NE if logits_NE.dtype == torch.float64 else logits_NE.float()


def balanced_scores(logits_NE: Tensor, config: TransformerConfig) -> Tensor:
    """Scores [N, E] of the balancing loss; they sum to 1 for each token."""
    if config.moe_router_score_function == "sigmoid":
        scores_NE = torch.sigmoid(_scoring(logits_NE))
        return scores_NE / (scores_NE.sum(dim=-1, keepdim=True) + 1e-20)
    return torch.softmax(_scoring(logits_NE), dim=-1)


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


def routing_weights(logits_NE: Tensor, chosen_NK: Tensor, config: TransformerConfig) -> Tensor:
    """Weights [N, K] of the experts ``chosen_NK``, by Megatron's rules."""
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
    return weights_NK
