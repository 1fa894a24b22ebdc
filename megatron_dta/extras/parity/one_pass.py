"""Runs the model of a Hugging Face checkpoint once with this project and once with transformers, both in float64.

It compares logits, logprobs, gradients and weights. This project runs the training engine with every sequence alone;
the reference is transformers with its plain attention. The loss is the mean negative logprob of the tokens. In float32
the gradients of a trained model are known to 1e-3 on either side, so a fault could hide behind rounding. All tensors
have the names of transformers' model; version 5 stacks the experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_dta.core.config import ObjectiveConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.hybrid.path_states import WholeSequence
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample

# Of the largest of all gradients: rounding in float64 is 1e-9 of this.
_LEAST = 1e-6

Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class OnePass:
    """The outputs and gradients of a model for some sequences, and its weights.

    Attributes:
        logits: float64 [T, vocabulary] of every sequence.
        logprobs: float64 [T] of every sequence, 0 at the first token.
        loss: mean negative logprob.
        gradients, weights: by name.
    """

    logits: list[Tensor]
    logprobs: list[np.ndarray]
    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The largest difference of two tensors, and the largest relative to the reference: of a weight each number by
    itself, as rounding and a wrong row are seen in small numbers only; else relative to the largest magnitude."""

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


def run_ours(model: TreeGPTModel, rename: Rename, samples: Sequence[TrainingSample]) -> OnePass:
    """The pass by the training engine."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = [_logits(model, sample, device).cpu() for sample in samples]
    longest = max(len(sample.token_ids) for sample in samples)
    engine = TreeEngine(model, 1.0, 256)
    batch = prepare_batch(samples, TreeConfig(tree_mode="dense", tree_segment_tokens=longest), "token-mean")
    logprobs = engine.compute_logprobs(batch)
    result = engine.forward_backward(batch, make_objective(ObjectiveConfig(objective="sft")))
    gradients, weights = map(rename, _gradients_and_weights(model))
    # On the host, so that only one model is in memory; no checkpoint has weights of more than 32 bits.
    gradients = {name: tensor.cpu().clone() for name, tensor in gradients.items()}
    weights = {name: tensor.float().cpu() for name, tensor in weights.items()}
    return OnePass(logits, logprobs, float(result.loss), gradients, weights)


def run_reference(reference: torch.nn.Module, samples: Sequence[TrainingSample]) -> OnePass:
    """The pass by transformers' model, one sequence at a time."""
    device = next(reference.parameters()).device
    count = sum(sample.num_trained for sample in samples)
    all_logits, all_logprobs, total = [], [], 0.0
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64)).to(device)
        with _KeepFloat64():
            logits = reference(input_ids=tokens[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits, dim=-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        loss = -logprobs.sum() / count
        loss.backward()
        total += float(loss.detach())
        all_logits.append(logits.detach().cpu())
        all_logprobs.append(np.append(0.0, logprobs.detach().cpu().numpy()))
    return OnePass(all_logits, all_logprobs, total, *_gradients_and_weights(reference))


class _KeepFloat64(TorchFunctionMode):
    """Leaves float64 tensors as they are where transformers converts to float32: in norms, softmax and routers."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


def differences(computed: OnePass, reference: OnePass) -> list[Difference]:
    """One line each for logits, logprobs and loss, then one for each tensor's gradient and weight."""
    rows = [
        _difference("logits", "", torch.cat(computed.logits), torch.cat(reference.logits)),
        _difference("logprobs", "", *(torch.from_numpy(np.concatenate(s.logprobs)) for s in (computed, reference))),
        _difference("loss", "", torch.tensor(computed.loss), torch.tensor(reference.loss)),
    ]
    ours, theirs = computed.gradients, reference.gradients
    # A gradient may be zero but for rounding.
    least = _LEAST * max((float(gradient.abs().max()) for gradient in theirs.values()), default=0.0)
    rows += [
        _difference("gradient", name, ours.get(name), theirs.get(name), least) for name in _all_names(ours, theirs)
    ]
    ours, theirs = computed.weights, reference.weights
    return rows + [_difference("weight", name, ours.get(name), theirs.get(name)) for name in _all_names(ours, theirs)]


def _all_names(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    return list(theirs) + sorted(ours.keys() - theirs.keys())


def _difference(
    kind: str, name: str, computed: Tensor | None, expected: Tensor | None, least: float = 0.0
) -> Difference:
    """The difference is infinite for a tensor that only one side has, and for one that contains NaN.

    Args:
        least: a largest magnitude below it is taken to be it.
    """
    if computed is None or expected is None or computed.shape != expected.shape:
        return Difference(kind, name, math.inf, math.inf)
    expected = expected.double()
    distance, scale = (computed.to(expected) - expected).abs(), expected.abs()
    if not math.isfinite(float(distance.max())):
        return Difference(kind, name, math.inf, math.inf)
    relative = torch.where(distance > 0, distance / (scale if kind == "weight" else scale.max().clamp(min=least)), 0.0)
    return Difference(kind, name, float(distance.max()), float(relative.max()))


def _gradients_and_weights(module: torch.nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, zero if there is none, and parameters by name."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: torch.zeros_like(weights[name]) if g is None else g for name, g in gradients.items()}, weights


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
    context = _CausalContext(position_ids=positions, path_states=WholeSequence(model.recurrent_layers))
    return model.logits(model(tokens[None], context))
