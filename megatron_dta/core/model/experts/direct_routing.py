"""Runs router and experts of a layer as a part of its one autograd function (``layers.fused_autograd_layer``).

The steps, their order and their results are those of ``routed_layer``, exchange with other ranks included. Only the
router's weights are a graph of their own, which begins at the logits: every kind of routing and its auxiliary losses
stay as they are in ``router``. The tokens are kept if they come from other ranks, otherwise they are recomputed.

Legend: N tokens, C hidden size, E experts, K experts of each token; R tokens that the rank has received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.experts.fused_experts import FusedGroupedExperts
from megatron_dta.core.model.experts.grouped_experts import ExpertsRun, KeptRows
from megatron_dta.core.model.experts.routed_layer import TreeMoELayer


@dataclass(slots=True)
class _Kept:
    """What a pass keeps for its backward, which sets it to None as it goes.

    Attributes:
        logits: [N, E], where the graph of ``weights`` [N, K] begins.
        exchange: a ``RowExchange``; None on one rank.
        tokens: [R, C] of all ranks; None without an exchange.
    """

    logits: Tensor | None
    weights: Tensor | None
    run: ExpertsRun | None
    rows: KeptRows | None
    exchange: Any
    tokens: Tensor | None


class DirectRouting:
    """Forward and backward of router and experts.

    Args:
        mlp: a layer's experts for which ``is_plain`` holds.
    """

    def __init__(self, mlp: TreeMoELayer) -> None:
        self.mlp = mlp

    @staticmethod
    def is_plain(mlp: TreeMoELayer) -> bool:
        """Whether this class supports the experts, whose gradient buffers exist."""
        return type(mlp.experts) is FusedGroupedExperts and not mlp.use_shared_expert and mlp.router.bias is None

    def forward(self, x_NC: Tensor, context: AttentionContext, is_kept: bool) -> tuple[Tensor, _Kept]:
        """Sums [N, C] of the experts' outputs, and what the backward needs."""
        mlp, tokens = self.mlp, None
        logits = mlp.router.gating(x_NC)
        with torch.set_grad_enabled(is_kept):
            weights, chosen = mlp.router.route(logits.requires_grad_(is_kept), context.routing)
        exchange = mlp.exchange(len(x_NC), context)
        if exchange is None:
            run = mlp.experts.direct_run(mlp.rows(chosen, are_all_here=True), None, context.step)
            output, rows = run.forward(x_NC, weights.detach(), is_kept)
        else:
            tokens, all_weights, chosen = exchange.start_tokens(x_NC, weights.detach(), chosen)
            run = mlp.experts.direct_run(mlp.rows(chosen, are_all_here=False), exchange.later, context.step)
            exchange.wait()
            output, rows = run.forward(tokens, all_weights, is_kept)
            returned = exchange.start_give_back(output)
            exchange.wait()
            output = exchange.sums(returned)
        return output, _Kept(logits, weights, run, rows, exchange, tokens)

    def backward(self, grad_NC: Tensor, kept: _Kept, tokens: Callable[[], Tensor]) -> Tensor:
        """The gradient of the tokens [N, C]; gradients of the parameters are added to their buffers.

        Args:
            tokens: recomputes them.
        """
        exchange, run, rows = kept.exchange, kept.run, kept.rows
        # Attention follows, which needs the memory.
        kept.run = kept.rows = None
        if exchange is None:
            x_NC = tokens()
            grad_x, grad_weights, _ = run.backward(grad_NC, x_NC, rows)
        else:
            grad = exchange.start_gather(grad_NC)
            exchange.wait()
            grads = run.backward(grad, kept.tokens, rows)[:2]
            returned = [exchange.start_give_back(gradient) for gradient in grads]
            del grad, grads, rows
            exchange.wait()
            kept.tokens = None
            grad_x, grad_weights = map(exchange.sums, returned)
            x_NC = tokens()
        (grad_logits,) = torch.autograd.grad(kept.weights, kept.logits, grad_weights)
        kept.weights = kept.logits = None
        weight = self.mlp.router.weight
        grad_x += torch.mm(grad_logits, weight.to(grad_logits.dtype)).to(grad_x.dtype)
        dtype = min(grad_logits.dtype, weight.main_grad.dtype, key=lambda dtype: dtype.itemsize)
        add_weight_gradient(weight.main_grad, grad_logits.to(dtype), x_NC.to(dtype))
        return grad_x
