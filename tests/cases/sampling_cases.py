"""Models and the slow twin of sampling: the whole prefix again for every token, attention and draw in plain loops."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.common.keyed_random import keyed_uniform
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult
from megatron_dta.sampling.interface import generate as generate_with
from megatron_dta.sampling.params import SamplingParams

VOCAB, EOS = 23, 22
SHAPES = {
    "tied, one head size": dict(untie_embeddings_and_output_weights=False),
    "grouped queries, QK-norm, untied": dict(
        num_query_groups=2, qk_layernorm=True, untie_embeddings_and_output_weights=True
    ),
    "padded vocabulary, narrow heads": dict(make_vocab_size_divisible_by=16, kv_channels=6, swiglu=False),
}


def sampling_config(dtype: torch.dtype = torch.float64, **changes: Any) -> ModelConfig:
    """A small model whose logits are far from uniform."""
    settings = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, swiglu=True, vocab_size=VOCAB,
        max_position_embeddings=96, init_method_std=0.25, params_dtype=dtype,
    )  # fmt: skip
    return ModelConfig(**{**settings, **changes})


def make_model(seed: int, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random model of ``sampling_config``."""
    device = initialize_parallel(seed)
    return build_model(sampling_config(dtype, **changes), device)


@dataclass
class PlainContext(AttentionContext):
    """One sequence in one pass: causal attention written out, without a cache."""

    def attend(self, layer_number: int, query: Any, key: Any, value: Any, scale: float) -> Any:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        hidden = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).triu(1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


def full_logprobs(model: Any, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """log-softmax of every position of one sequence [T, V]."""
    weight = model.output_weight()
    with torch.no_grad():
        context = PlainContext(position_ids=torch.arange(len(tokens), device=weight.device))
        hidden = model(torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None].to(weight.device), context)
        logits = (hidden @ weight.t()).to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        return torch.log_softmax(logits / temperature, dim=-1).cpu().numpy()


def random_prompts(rng: np.random.Generator, lengths: Any) -> list[np.ndarray]:
    """Prompts of the given lengths without an end of sequence."""
    return [rng.integers(0, VOCAB - 1, length).astype(np.int32) for length in lengths]


def slow_sample(
    model: Any, request: GenerationRequest, params: SamplingParams, iteration: int, guess: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of one response; while it is as in ``guess``, one pass over both serves for all tokens."""
    tokens, logprobs = [int(token) for token in request.token_ids], []
    guessed = [*tokens, *(int(token) for token in guess)]
    rows = full_logprobs(model, np.array(guessed), params.temperature or 1.0)
    while len(logprobs) < request.max_tokens:
        if tokens == guessed[: len(tokens)]:
            row = rows[len(tokens) - 1]
        else:
            row = full_logprobs(model, np.array(tokens), params.temperature or 1.0)[-1]
        row = row[: params.vocab_size]
        probabilities = np.exp(row.astype(np.float64))
        probabilities /= probabilities.sum() if params.top_p < 1 else 1
        if params.temperature == 0:
            token = int(np.argmax(row))
        else:
            position = (np.array([request.key]), np.array([len(tokens)]))
            number = keyed_uniform(params.seed, params.domain, iteration, *position)[0]
            token = slow_draw(slow_nucleus(probabilities, params.top_p), number)
        tokens.append(token)
        logprobs.append(row[token])
        if token in (params.eos_id, *params.other_eos_ids):
            break
    return tokens[len(request.token_ids) :], logprobs


def slow_nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    if top_p >= 1:
        return probabilities
    kept, mass = np.zeros_like(probabilities), 0.0
    for token in sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token)):
        kept[token] = probabilities[token]
        mass += probabilities[token]
        if mass >= top_p:
            break
    return kept


def slow_draw(weights: np.ndarray, number: float) -> int:
    total = 0.0
    threshold = number * np.cumsum(weights)[-1]
    for token, weight in enumerate(weights):
        total += weight
        if total > threshold:
            return token
    raise AssertionError("the threshold is not below the total")


def generate(
    model: Any, prompts: Any, sequence_prompt: Any, sequence_ids: Any, params: SamplingParams, iteration: int,
    **settings: Any,
) -> list[GenerationResult]:  # fmt: skip
    """One response for each sequence from an engine with ``settings``, which is empty afterwards."""
    engine = InProcessEngine(model, EngineSettings(**settings))
    engine.start(params, iteration)
    requests = [
        GenerationRequest(i, prompts[prompt], params.max_response_tokens, int(key))
        for i, (prompt, key) in enumerate(zip(sequence_prompt, sequence_ids, strict=True))
    ]
    results = generate_with(engine, requests)
    engine.join()
    assert engine.pages_in_use == 0
    return results
