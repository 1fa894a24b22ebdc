"""Runs the references: one sequence at a time, all logits, plain log-softmax, autograd for everything.

They share no code with the tree path except the objective and the weights of the loss, which are ordinary functions of
one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.core.objectives.fields import LossFields, TokenLosses
from megatron_dta.core.objectives.weights import loss_weights
from megatron_dta.core.planning.step.sample import FIELDS, TrainingSample
from megatron_dta.extras.parity.merged_adapters import load_merged, unmerged_name
from megatron_dta.extras.parity.outcome import Outcome
from megatron_dta.extras.parity.plain_router import PlainRouter

Objective = Callable[[Tensor, Tensor, LossFields], TokenLosses]


def run_stock(
    model: ModelConfig,
    weights: dict[str, Tensor],
    samples: Sequence[TrainingSample],
    objective: Objective,
    temperature: float = 1.0,
    loss_aggregation: str = "token-mean",
) -> Outcome:
    """Train ``samples`` one by one on Megatron's stock model with ``weights``, in the precision of ``model``.

    Adapters (LoRA) are part of the weights of the linear layers here, see ``merged_adapters``. A model with experts
    gets ``PlainRouter``; its auxiliary losses are averaged over the samples and, as in training, are not part of the
    returned loss.
    """
    device = next(iter(weights.values())).device
    # No recomputation: the auxiliary losses of a forward that runs again in the backward would come too late.
    kept = replace(model, recompute_granularity=None)
    stock = build_stock_model(kept, device, PlainRouter)
    if model.lora_rank is None:
        stock.load_state_dict(weights)
    else:
        load_merged(stock, weights, model)
    routers = [module for module in stock.modules() if isinstance(module, PlainRouter)]

    def logits_of(token_ids: Tensor) -> Tensor:
        length = token_ids.shape[1]
        hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        return stock(token_ids, torch.arange(length, device=device)[None], hidden_from)[0]

    def auxiliary_loss() -> Tensor | float:
        return sum(router.losses.pop() for router in routers) / len(samples)

    outcome = run_one_by_one(stock, logits_of, samples, objective, temperature, loss_aggregation, auxiliary_loss)
    if model.lora_rank is None:
        return outcome
    return replace(outcome, gradients={unmerged_name(name): grad for name, grad in outcome.gradients.items()})


def run_one_by_one(
    module: torch.nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    samples: Sequence[TrainingSample],
    objective: Objective,
    temperature: float,
    loss_aggregation: str,
    auxiliary_loss: Callable[[], Tensor | float] = lambda: 0.0,
) -> Outcome:
    """Train ``samples`` one by one on any model that gives ``logits_of`` token ids [1, T]."""
    trained_tokens = np.array([sample.num_trained for sample in samples])
    sequence_weights = np.array([sample.weight for sample in samples])
    weights = loss_weights(trained_tokens, loss_aggregation, sequence_weights=sequence_weights)
    device = next(module.parameters()).device
    total, all_logprobs = 0.0, []
    for sample, weight in zip(samples, weights, strict=True):
        # Tokens after the last trained one are in no loss, including the auxiliary losses of experts.
        token_ids = torch.from_numpy(sample.token_ids[: sample.needed_length].astype(np.int64)).to(device)[None]
        trained = torch.from_numpy(np.flatnonzero(sample.loss_mask)).to(device)
        distributions = torch.log_softmax(logits_of(token_ids) / temperature, dim=-1)[trained - 1]
        logprobs = distributions.gather(1, token_ids[0, trained, None]).squeeze(1)
        entropy = -(distributions.exp() * distributions).sum(-1)
        losses = objective(logprobs, entropy, _fields(sample, logprobs))
        loss = losses.loss.sum() * float(weight)
        (loss + auxiliary_loss()).backward()
        total += float(loss.detach().double())
        spread = np.zeros(len(sample.token_ids))
        spread[sample.loss_mask] = logprobs.detach().double().cpu().numpy()
        all_logprobs.append(spread)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Outcome(total, all_logprobs, gradients)


def _fields(sample: TrainingSample, like: Tensor) -> LossFields:
    fields = {}
    for name in FIELDS:
        values = getattr(sample, name)
        fields[name] = None if values is None else torch.as_tensor(values[sample.loss_mask]).to(like)
    return LossFields(loss_mask=torch.ones(sample.num_trained, dtype=torch.bool, device=like.device), **fields)
