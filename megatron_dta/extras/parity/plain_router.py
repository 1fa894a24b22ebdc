"""Reference of the tree's router: one sequence in one forward, every formula written out, autograd for everything.

It is for the reference in float64, because Megatron's own router computes its scores in float32 for every input. The
balancing loss and the z-loss are plain functions of the one sequence; the caller sets their factor in the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class PlainRouter(TopKRouter):
    """Router for a forward over one whole sequence.

    Attributes:
        losses: balancing loss plus z-loss of every forward since the list was emptied, times their coefficients.
        loads: per expert, tokens routed to it in every forward since then.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[Tensor] = []
        self.loads = torch.zeros(self.config.num_moe_experts, dtype=torch.int64)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and map [tokens, experts]."""
        config, length = self.config, input.shape[0]
        logits = F.linear(input[:, 0], self.weight, self.bias)
        sigmoid = config.moe_router_score_function == "sigmoid"
        scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=1)
        routed = torch.stack([self._experts_of(row, score) for row, score in zip(logits, scores, strict=True)])
        chosen = torch.where(routed, scores, 0.0)
        if sigmoid and config.moe_router_topk > 1:
            chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
        elif not sigmoid and not config.moe_router_pre_softmax:
            chosen = chosen / chosen.sum(1, keepdim=True)
        self.loads = self.loads.to(routed.device) + routed.sum(0)
        self.losses.append(self._auxiliary_loss(logits, scores, length))
        return chosen * (config.moe_router_topk_scaling_factor or 1.0), routed

    def _experts_of(self, logits: Tensor, scores: Tensor) -> Tensor:
        """The experts of one token, bool [experts]."""
        config = self.config
        by = scores if config.moe_router_score_function == "sigmoid" or config.moe_router_pre_softmax else logits
        by = by.detach() if self.expert_bias is None else by.detach() + self.expert_bias
        if config.moe_router_group_topk:
            groups = by.view(config.moe_router_num_groups, -1)
            per_group = config.moe_router_topk // config.moe_router_group_topk
            best = groups.sort(dim=1, descending=True)[0][:, :per_group].sum(1).argsort(descending=True)
            allowed = torch.zeros_like(groups, dtype=torch.bool)
            allowed[best[: config.moe_router_group_topk]] = True
            by = by.masked_fill(~allowed.flatten(), -torch.inf)
        routed = torch.zeros_like(by, dtype=torch.bool)
        routed[by.argsort(descending=True)[: config.moe_router_topk]] = True
        return routed

    def _auxiliary_loss(self, logits: Tensor, scores: Tensor, length: int) -> Tensor:
        """E x sum over experts of (fraction of the K x tokens routed to it) x (mean score), and mean log-sum-exp^2."""
        config, topk = self.config, self.config.moe_router_topk
        total = logits.new_zeros(())
        if config.moe_aux_loss_coeff:
            if config.moe_router_score_function == "sigmoid":
                scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
            fraction = torch.zeros_like(scores[0])
            for row in scores:
                fraction[row.argsort(descending=True)[:topk]] += 1 / (length * topk)
            total = total + config.moe_aux_loss_coeff * config.num_moe_experts * (fraction * scores.mean(0)).sum()
        if config.moe_z_loss_coeff:
            total = total + config.moe_z_loss_coeff * torch.logsumexp(logits, dim=1).square().mean()
        return total
