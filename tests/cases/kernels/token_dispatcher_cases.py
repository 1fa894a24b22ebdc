"""Cases and helpers that tests of token dispatcher share."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from conftest import seed_all
from megatron_dta.model.experts.token_dispatcher import TreeDispatcher
from tree_attention_cases import poisoned_memory
from tree_engine_cases import model_config

MODEL = model_config(torch.float32, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=4, num_layers=1)


E, K, C = MODEL.num_experts, MODEL.moe_router_topk, MODEL.hidden_size


def random_tokens(
    num_tokens: int, unused: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [N, 1, C], experts [N, K] other than the first ``unused``, weights [N, K], and a gradient [N, 1, C]."""
    seed_all(seed)
    chosen = unused + torch.rand(num_tokens, E - unused).argsort(dim=1)[:, :K]
    x, grad = torch.randn(2, num_tokens, 1, C, dtype=dtype)
    return x, chosen, torch.rand(num_tokens, K, dtype=dtype), grad


def megatrons(own: TreeDispatcher) -> MoEAlltoAllTokenDispatcher:
    groups = SimpleNamespace(ep=own.ep_group, expt_tp=own.tp_group, tp_ep=own.tp_ep_group)
    return MoEAlltoAllTokenDispatcher(own.num_local_experts, own.local_expert_indices, own.config, groups)


def through(
    dispatcher: MoEAlltoAllTokenDispatcher, x: Tensor, routed: Tensor, weights: Tensor, grad: Tensor
) -> list[Tensor]:
    """Rows of the experts here, their numbers, the output, and gradients by tokens and weights.

    An expert multiplies each column by another number, and by the row's weight.
    """
    given = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    rows, counts, own_weights = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(given[0], routed, given[1]))
    )
    expert = torch.arange(len(counts)).repeat_interleave(counts.cpu()) + dispatcher.local_expert_indices[0]
    factors = torch.sin(torch.arange(E * C).view(E, C) + 1.0).to(x.dtype)
    made = rows * factors[expert] * own_weights.unsqueeze(-1)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(made)))
    return [rows.detach(), counts, output.detach(), *torch.autograd.grad(output, given, grad)]


def both_ways(own: TreeDispatcher, x: Tensor, chosen: Tensor, weights: Tensor, grad: Tensor) -> list[list[Tensor]]:
    with poisoned_memory():
        found = through(own, x, chosen, weights, grad)
    routed = torch.zeros(len(x), E, dtype=torch.bool).scatter(1, chosen, True)
    *expected, by_map = through(
        megatrons(own), x, routed, torch.zeros(len(x), E, dtype=x.dtype).scatter(1, chosen, weights), grad
    )
    return [found, [*expected, by_map.gather(1, chosen)]]
