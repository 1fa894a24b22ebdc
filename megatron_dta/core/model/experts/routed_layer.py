"""A transformer layer with experts: Megatron's modules, our order of routing, exchange and computation.

Megatron's dispatcher sends a copy of a token for each of its experts, orders rows by masks and splits, and waits for
the host in between. Here a token travels once to each rank (``row_exchange``), and the experts of a rank read it there
by index (``expert_rows``, ``grouped_experts``). In the forward of a layer:

1. The router chooses experts; choices and weights are exchanged.
2. The tokens start to travel. Meanwhile rows are arranged, their numbers go to the host, and shared experts compute.
3. The experts compute, and each token's outputs are summed on each rank.
4. The sums travel back and are added.

On one rank nothing travels. Parameters, checkpoints and shared experts are Megatron's.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from dta_kernels.experts.reference import order_rows, sum_rows
from megatron_dta.core.extensions import EXPERT_PARALLEL
from megatron_dta.core.model.attention.context import AttentionContext, check_context
from megatron_dta.core.model.experts.expert_rows import ExpertRows, RowOrder, RowSums, ToRows, ToTokens, expert_rows
from megatron_dta.core.model.experts.grouped_experts import GroupedExperts


class TreeMoELayer(MoELayer):
    """Router, experts and shared experts of a layer.

    Attributes:
        context: the pass that the layer is running.
        sum_rows: adds up rows of a token.
        order_rows: orders them by expert.
    """

    context: AttentionContext | None = None
    sum_rows: RowSums = staticmethod(sum_rows)
    order_rows: RowOrder = staticmethod(order_rows)

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Output in the shape of ``hidden_states`` [n, 1, hidden size], and no bias."""
        # Another pass may run through this layer before this one has left it.
        context = self.context
        weights_NK, chosen_NK = self.router(hidden_states)
        x_NC = hidden_states.reshape(-1, hidden_states.shape[-1])
        exchange = self.exchange(len(x_NC), context)
        if exchange is None:
            rows = self.rows(chosen_NK, are_all_here=True)
            shared = self._shared_output(hidden_states)
            output = self._computed(x_NC, weights_NK, rows, context, None)
        else:
            x, weights, chosen = exchange.begin_gather(x_NC, weights_NK, chosen_NK)
            rows = self.rows(chosen, are_all_here=False)
            shared = self._shared_output(hidden_states)
            x, weights = exchange.end_gather(x, weights)
            partial = self._computed(x, weights, rows, context, exchange)
            output = exchange.give_back(partial)
        output = output.view(hidden_states.shape)
        return output if shared is None else output + shared, None

    def begin(self, context: AttentionContext) -> None:
        """Tell router and experts of the pass that the layer is about to run; what it holds may go when it ends."""
        self.context = self.router.context = weakref.proxy(context)

    def exchange(self, num_rows: int, context: AttentionContext | None) -> Any:
        """The ``RowExchange`` of a pass with other ranks; None if there are none."""
        # Megatron's dispatcher only provides the groups.
        group = self.token_dispatcher.tp_ep_group
        if group.size() == 1:
            return None
        most = num_rows if context is None else context.rows_per_rank or num_rows
        return EXPERT_PARALLEL.part.row_exchange(group, num_rows, most, self.sum_rows)

    def rows(self, chosen: Tensor, are_all_here: bool) -> ExpertRows:
        """The rows of this rank's experts; ``are_all_here`` if no other rank has any."""
        first = self.local_expert_indices[0]
        return expert_rows(chosen, first, self.num_local_experts, are_all_here, self.order_rows)

    def _shared_output(self, hidden_states: Tensor) -> Tensor | None:
        return self.shared_experts(hidden_states) if self.use_shared_expert else None

    def _computed(
        self, x_RC: Tensor, weights_RK: Tensor, rows: ExpertRows, context: AttentionContext | None, exchange: Any
    ) -> Tensor:
        """Sums [R, C] of this rank's experts for each token."""
        if isinstance(self.experts, GroupedExperts):
            later = None if exchange is None else exchange.later
            runs_hooks, step = getattr(context, "runs_hooks", True), getattr(context, "step", None)
            return self.experts(x_RC, weights_RK, rows, runs_hooks, later, step)
        rows_RC, weights_R = ToRows.apply(x_RC, weights_RK, rows, self.sum_rows)
        made_RC, _ = self.experts(rows_RC, torch.tensor(rows.host.tolist()), weights_R)
        return ToTokens.apply(made_RC, rows, self.sum_rows)


class RoutedLayer(TransformerLayer):
    """Megatron's transformer layer, which passes the context to its router and its experts.

    The core attention gets it as an argument, also in a recomputation; this layer hands it to the router and experts.
    """

    def forward(self, *args: object, **kwargs: object) -> object:
        self.mlp.begin(check_context(kwargs.get("packed_seq_params")))
        return super().forward(*args, **kwargs)
