"""Plain references for losses on trees: every sequence runs alone through Megatron's stock model in float64, all in
one autograd graph, and the loss of the step is written out over lists of sequences from the formulas of the papers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity import random_training_samples
from megatron_dta.extras.parity.plain_router import PlainRouter
from tree_engine_cases import branching_sequences, model_config, weights_of

TEMPERATURE = 0.7


@dataclass
class Alone:
    """One sequence of a reference: tensors over its trained tokens."""

    logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor


def one_by_one(
    model: ModelConfig, weights: dict[str, Tensor], samples: Sequence[TrainingSample], temperature: float = TEMPERATURE
) -> tuple[torch.nn.Module, list[Tensor], list[Tensor]]:
    """The stock model, and logprobs and entropies of the trained tokens of each sample, in one graph."""
    stock = build_stock_model(model, torch.device("cpu"))
    stock.load_state_dict(weights)
    logprobs, entropies = [], []
    for sample in samples:
        logits = _logits(stock, sample.token_ids) / temperature
        trained = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        distribution = torch.log_softmax(logits, -1)[trained - 1]
        targets = torch.from_numpy(sample.token_ids.astype(np.int64))[trained]
        logprobs.append(distribution[torch.arange(len(trained)), targets])
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    return stock, logprobs, entropies


def values_one_by_one(
    model: ModelConfig, weights: dict[str, Tensor], samples: Sequence[TrainingSample]
) -> tuple[torch.nn.Module, list[Tensor]]:
    """The same for a critic: its head is the first row of the stock model's output weight, the others are 0.

    A model with experts has ``PlainRouter``, whose auxiliary losses of each sample are left in it.
    """
    untied = replace(model, untie_embeddings_and_output_weights=True)
    stock = build_stock_model(untied, torch.device("cpu"), PlainRouter if model.num_experts else None)
    head = weights["output_layer.weight"]
    padded = torch.zeros(stock.output_layer.weight.shape, dtype=head.dtype)
    padded[0] = head[0]
    stock.load_state_dict(weights | {"output_layer.weight": padded})
    values = []
    for sample in samples:
        trained = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        # What follows the last trained token is in no loss, the auxiliary ones of experts included.
        values.append(_logits(stock, sample.token_ids[: sample.needed_length])[trained - 1, 0])
    return stock, values


def _logits(stock: torch.nn.Module, token_ids: np.ndarray) -> Tensor:
    tokens = torch.from_numpy(token_ids.astype(np.int64))[None]
    length = tokens.shape[1]
    hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return stock(tokens, torch.arange(length)[None], hidden_from)[0]


def make_case(seed: int) -> tuple[ModelConfig, dict[str, Tensor], list[TrainingSample]]:
    """A small model, and samples whose fields differ at shared tokens, near the model's own logprobs."""
    generator = np.random.default_rng(seed)
    samples = random_training_samples(branching_sequences(generator, count=9, longest=12), seed=seed)
    model = model_config(qk_layernorm=True)
    weights = weights_of(model, seed=seed)
    _, logprobs, _ = one_by_one(model, weights, samples)
    near = []
    for sample, present in zip(samples, logprobs, strict=True):
        fields = {}
        for name, spread in (("old_logprobs", 0.3), ("ref_logprobs", 0.5), ("rollout_logprobs", 0.5)):
            fields[name] = np.full(len(sample.token_ids), np.nan)  # nothing may read what is not trained
            fields[name][sample.loss_mask] = present.detach().numpy() + generator.normal(0, spread, len(present))
        near.append(replace(sample, **fields))
    return model, weights, near


def reference_gradients(
    model: ModelConfig,
    weights: dict[str, Tensor],
    samples: Sequence[TrainingSample],
    loss: Callable[[list[Alone]], Tensor],
) -> tuple[float, dict[str, Tensor]]:
    """The loss of the step and its gradients."""
    stock, logprobs, entropies = one_by_one(model, weights, samples)
    sequences = []
    for sample, present, entropy in zip(samples, logprobs, entropies, strict=True):
        names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
        fields = [torch.from_numpy(getattr(sample, name)[sample.loss_mask]) for name in names]
        sequences.append(Alone(present, entropy, *fields))
    total = loss(sequences)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}


def largest_error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference relative to each parameter's largest magnitude; NaN if any is (``max`` may pass over one).

    An expert that no token went to has a gradient of zero, which must be found as it is.
    """
    assert gradients.keys() == expected.keys()
    differences = {name: (gradients[name] - expected[name]).abs().max() for name in expected}
    errors = [d / expected[name].abs().max() if d != 0 else d for name, d in differences.items()]
    return float(np.max(torch.stack(errors).numpy()))
