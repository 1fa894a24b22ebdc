"""Runs one gradient step on the model of a Hugging Face checkpoint with this project and with transformers.

It compares logits, logprobs, gradients and new weights. This project runs the training engine with every sequence
alone; the reference is transformers with its plain attention. The loss is the mean negative logprob of the tokens, and
the step is plain gradient descent: ``w - lr x gradient``. (Adam's first step is the sign of the gradient, which shows
the sign of rounding errors wherever a gradient is nearly zero.) All tensors have the names of transformers' model;
version 5 stacks the experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.config import ObjectiveConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.hybrid.path_states import WholeSequence
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample

Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class OneStep:
    """The outputs of a model for some sequences, and its weights after one step on them.

    Attributes:
        logits: float32 [T, vocabulary] of every sequence.
        logprobs: float64 [T] of every sequence, 0 at the first token.
        loss: mean negative logprob.
        gradients, weights: by name; the weights after the step.
    """

    logits: list[Tensor]
    logprobs: list[np.ndarray]
    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Difference of two tensors: the largest absolute one, also relative to the reference's largest magnitude."""

    kind: str
    name: str
    absolute: float
    relative: float


def random_samples(vocab_size: int, count: int, length: int, seed: int) -> list[TrainingSample]:
    """``count`` sequences of ``length`` random tokens."""
    generator = np.random.default_rng(seed)
    return [training_sample(generator.integers(0, vocab_size, size=length)) for _ in range(count)]


def training_sample(token_ids: np.ndarray) -> TrainingSample:
    """The sequence with all tokens but the first trained."""
    mask = np.ones(len(token_ids), bool)
    mask[0] = False
    return TrainingSample(np.asarray(token_ids, np.int32), mask, advantages=np.ones(len(token_ids)))


def step_ours(model: TreeGPTModel, rename: Rename, samples: Sequence[TrainingSample], lr: float) -> OneStep:
    """The step by the training engine; changes ``model``."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = [_logits(model, sample, device).float().cpu() for sample in samples]
    longest = max(len(sample.token_ids) for sample in samples)
    engine = TreeEngine(model, 1.0, 256)
    batch = prepare_batch(samples, TreeConfig(tree_mode="dense", tree_segment_tokens=longest), "token-mean")
    logprobs = engine.compute_logprobs(batch)
    result = engine.forward_backward(batch, make_objective(ObjectiveConfig(objective="sft")))
    gradients = _descend(model, lr)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return OneStep(logits, logprobs, float(result.loss), rename(gradients), rename(weights))


def step_huggingface(reference: torch.nn.Module, samples: Sequence[TrainingSample], lr: float) -> OneStep:
    """The step by transformers' model, one sequence at a time; changes ``reference``."""
    device = next(reference.parameters()).device
    count = sum(sample.num_trained for sample in samples)
    all_logits, all_logprobs, total = [], [], 0.0
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64)).to(device)
        logits = reference(input_ids=tokens[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits, dim=-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        loss = -logprobs.sum() / count
        loss.backward()
        total += float(loss.detach())
        all_logits.append(logits.detach().float().cpu())
        all_logprobs.append(np.append(0.0, logprobs.detach().double().cpu().numpy()))
    gradients = _descend(reference, lr)
    weights = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    return OneStep(all_logits, all_logprobs, total, gradients, weights)


def differences(step: OneStep, reference: OneStep) -> list[Difference]:
    """One line each for logits, logprobs and loss, then one for each tensor's gradient and new weight."""
    rows = [
        _difference("logits", "", torch.cat(step.logits), torch.cat(reference.logits)),
        _difference("logprobs", "", *(torch.from_numpy(np.concatenate(s.logprobs)) for s in (step, reference))),
        _difference("loss", "", torch.tensor(step.loss), torch.tensor(reference.loss)),
    ]
    for kind, ours, theirs in (
        ("gradient", step.gradients, reference.gradients),
        ("weight", step.weights, reference.weights),
    ):
        rows += [_difference(kind, name, ours.get(name), theirs.get(name)) for name in _all_names(ours, theirs)]
    return rows


def _all_names(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    return list(theirs) + sorted(ours.keys() - theirs.keys())


def _difference(kind: str, name: str, computed: Tensor | None, expected: Tensor | None) -> Difference:
    """The difference is infinite for a tensor that only one side has, and for one that contains NaN."""
    if computed is None or expected is None or computed.shape != expected.shape:
        return Difference(kind, name, math.inf, math.inf)
    expected = expected.double()
    absolute = float((computed.to(expected) - expected).abs().max())
    largest = float(expected.abs().max())
    if not math.isfinite(absolute):
        return Difference(kind, name, math.inf, math.inf)
    # A gradient that is zero (an expert that no token chose) must be zero on both sides.
    return Difference(kind, name, absolute, absolute / largest if largest > 0 else math.inf if absolute else 0.0)


def _descend(module: torch.nn.Module, lr: float) -> dict[str, Tensor]:
    """Gradients by name, zero if there is none; also updates the parameters."""
    gradients = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = gradient.detach().clone()
            parameter.sub_(gradient, alpha=lr)
    return gradients


@dataclass
class _CausalContext(AttentionContext):
    """Attention over one whole sequence, written out: scores, mask, softmax."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        per_group = query.shape[1] // key.shape[1]
        keys, values = (tensor.repeat_interleave(per_group, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), values)


def _logits(model: TreeGPTModel, sample: TrainingSample, device: torch.device) -> Tensor:
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64)).to(device)
    positions = torch.arange(len(tokens), device=device)
    context = _CausalContext(position_ids=positions, path_states=WholeSequence())
    return model.logits(model(tokens[None], context))
