"""Plain sampling on the training weights: batched decoding with a K/V cache for prompts x samples.

Every prompt is prefilled once, its K and V are copied to its samples, and then all live sequences decode one token a
pass. Finished sequences leave the batch at once.

**Logprobs are the trainer's.** The recorded logprob of a token is log-softmax(logits / temperature) over the *full*
vocabulary in float32 (float64 for a float64 model), the same expression as the trainer's. With ``top_p`` below 1 the
token was drawn from the renormalized nucleus, whose logprobs are larger by -log(mass of the nucleus): the trainer then
optimizes the untruncated distribution with slightly off-policy samples, and importance ratios are still 1 at the
sampler's weights. Recording the truncated logprobs instead would make every ratio start away from 1 and clip for no
reason. Greedy decoding (temperature 0) records the logprobs of temperature 1.

**A sample does not depend on its batch.** The uniform number that draws a token is keyed by (seed, iteration, sequence
id, position), so the same sequence comes out alone, in a batch, in another order or after a restart. (Matrix products
of other shapes may round differently in the last bit, which moves a draw only if its number falls on that bit.)

Under tensor parallelism the ranks of a group hold parts of the cache, gather the logits and draw the same tokens. Ranks
that share experts run the same number of passes (``passes``).

Legend: B live sequences, V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.model.decode_context import DecodeCache, append_context
from megatron_dta.model.staged_model import Model
from megatron_dta.sampling.keyed_random import Domain, keyed_uniform
from megatron_dta.sampling.passes import DecodingPasses

# Bounds of the memory of one pass: prompt tokens prefilled at once, and logits whose softmax exists at once.
_PREFILL_TOKENS = 4096
_LOGIT_ELEMENTS = 2**24


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        max_response_tokens: length cap, the end of sequence included.
        eos_id: the token that ends a response; it is part of the response.
        temperature: divides the logits; 0 takes the most likely token (the lowest id of equals).
        top_p: tokens are drawn among the most likely ones that together hold at least this much probability.
        seed: of the keyed random numbers.
        domain: keeps the numbers of evaluation apart from those of training.
        max_sequences: most sequences decoded at once; bounds the cache and does not change the samples.
    """

    max_response_tokens: int
    eos_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    domain: Domain = Domain.SAMPLING
    max_sequences: int = 256

    def __post_init__(self) -> None:
        if self.max_response_tokens < 1:
            raise ValueError(f"max_response_tokens must be at least 1, got {self.max_response_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, got {self.max_sequences}")


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        token_ids: int32 [R], R >= 1, as sampled; the last is the end of sequence where ``ended``.
        logprobs: float32 [R] (float64 for a float64 model), see the module's docstring.
        ended: whether the end of sequence came before the length cap.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ended: bool


def generate(
    model: Model,
    prompts: Sequence[np.ndarray],
    sequence_prompt: np.ndarray,
    sequence_ids: np.ndarray,
    params: SamplingParams,
    iteration: int,
) -> list[Response]:
    """Sample one response for each sequence.

    Args:
        model: the weights to sample from; left as it was.
        prompts: token ids of each prompt, int [T], T >= 1.
        sequence_prompt: int [S], index of each sequence's prompt.
        sequence_ids: int64 [S] in [0, 2^32), the identity of each sequence within the iteration: with the seed, the
            iteration and the prompt it determines the response.
        params: temperature, nucleus, length cap, seed.
        iteration: number of the training step, in [0, 2^32).

    Returns:
        The responses, in the order of the sequences.

    Raises:
        ValueError: a prompt is empty, or too long for the model's positions with the length cap, or has ids outside of
            the vocabulary.
        FloatingPointError: the logits are not finite.
    """
    _check_prompts(model, prompts, params.max_response_tokens)
    responses: list[Response] = []
    with _sampling_mode(model), DecodingPasses(model) as passes:
        for first in range(0, len(sequence_prompt), params.max_sequences):
            batch = slice(first, first + params.max_sequences)
            used, row_prompt = np.unique(sequence_prompt[batch], return_inverse=True)
            ids = np.asarray(sequence_ids[batch], dtype=np.int64)
            responses += _generate_batch(passes, [prompts[i] for i in used], row_prompt, ids, params, iteration)
    return responses


def _generate_batch(
    passes: DecodingPasses,
    prompts: list[np.ndarray],
    row_prompt: np.ndarray,
    sequence_ids: np.ndarray,
    params: SamplingParams,
    iteration: int,
) -> list[Response]:
    """Decode all sequences of one batch to their ends."""
    model, config = passes.model, passes.model.config
    parameter = next(model.parameters())
    cache = DecodeCache(
        model.layer_numbers,
        len(prompts),
        config.num_query_groups // config.tensor_model_parallel_size,
        config.kv_channels,
        parameter.dtype,
        parameter.device,
    )
    prompt_rows = torch.from_numpy(row_prompt)
    hidden_BC = _prefill(passes, cache, prompts)[prompt_rows.to(parameter.device)]
    cache = cache.select_rows(prompt_rows)

    token_ids = np.zeros((len(sequence_ids), params.max_response_tokens), dtype=np.int32)
    logprobs = np.zeros(token_ids.shape, dtype=np.float64 if parameter.dtype == torch.float64 else np.float32)
    lengths = np.full(len(sequence_ids), params.max_response_tokens)
    ended = np.zeros(len(sequence_ids), dtype=bool)
    live = np.arange(len(sequence_ids))
    for step in range(params.max_response_tokens):
        noise = keyed_uniform(params.seed, params.domain, iteration, sequence_ids[live], cache.lengths.numpy())
        token_B, logprob_B = _next_tokens(model, hidden_BC, torch.from_numpy(noise), params)
        chosen = token_B.cpu()
        token_ids[live, step] = chosen.numpy()
        logprobs[live, step] = logprob_B.cpu().numpy()
        if not np.isfinite(logprobs[live, step]).all():
            raise FloatingPointError("the model's logits are not finite: its weights have diverged")
        alive = chosen != params.eos_id
        ended[live[~alive.numpy()]] = True
        lengths[live[~alive.numpy()]] = step + 1
        if step + 1 == params.max_response_tokens or not alive.any():
            break
        if not alive.all():
            rows = alive.nonzero().squeeze(1)
            cache, live, token_B = cache.select_rows(rows), live[rows.numpy()], token_B[rows.to(token_B.device)]
        context = append_context(cache, torch.ones(live.size, dtype=torch.int64))
        hidden_BC = passes(token_B.unsqueeze(0), context)
    return [Response(token_ids[i, :n], logprobs[i, :n], bool(ended[i])) for i, n in enumerate(lengths)]


def _prefill(passes: DecodingPasses, cache: DecodeCache, prompts: list[np.ndarray]) -> Tensor:
    """Run every prompt through the model once; returns the hidden state of each one's last token, [prompts, C]."""
    device = cache.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    last_hidden: list[Tensor] = []
    rows_per_pass = max(1, _PREFILL_TOKENS // int(lengths.max()))
    for first in range(0, len(prompts), rows_per_pass):
        group = torch.arange(first, min(first + rows_per_pass, len(prompts)))
        for begin in range(0, int(lengths[group].max()), _PREFILL_TOKENS):
            # More than one piece is needed only for a prompt that fills a pass alone, so no piece is empty.
            pieces = [prompts[row][begin : begin + _PREFILL_TOKENS] for row in group.tolist()]
            counts = torch.tensor([len(piece) for piece in pieces])
            tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int64)).to(device)
            hidden = passes(tokens.unsqueeze(0), append_context(cache, counts, group))
        last_hidden.append(hidden[(torch.cumsum(counts, 0) - 1).to(device)])
    return torch.cat(last_hidden)


def _next_tokens(model: Model, hidden_BC: Tensor, noise_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row; returns (int64 [B], its logprob [B])."""
    noise_B = noise_B.to(hidden_BC.device)
    rows = max(1, _LOGIT_ELEMENTS // model.true_vocab_size)
    tokens, logprobs = [], []
    for hidden, noise in zip(hidden_BC.split(rows), noise_B.split(rows), strict=True):
        logits = model.logits(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logprobs_BV = torch.log_softmax(logits / (params.temperature or 1.0), dim=-1)
        if params.temperature == 0:
            token = first_argmax(logprobs_BV)
        else:
            token = draw(nucleus(logprobs_BV.double().exp(), params.top_p), noise)
        tokens.append(token)
        logprobs.append(logprobs_BV.gather(-1, token.unsqueeze(-1)).squeeze(-1))
    return torch.cat(tokens), torch.cat(logprobs)


def first_argmax(scores_BV: Tensor) -> Tensor:
    """Index of each row's largest score, the lowest of equals (``torch.argmax`` does not promise which), int64 [B]."""
    is_largest = scores_BV == scores_BV.amax(dim=-1, keepdim=True)
    first_B = is_largest.cumsum(dim=-1).eq(0).sum(dim=-1)
    return first_B.clamp_max(scores_BV.shape[1] - 1)  # NaN equals nothing


def nucleus(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """The probabilities with all but the nucleus set to 0 (not renormalized).

    The nucleus (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020) is the smallest set of most
    likely tokens whose probability together is at least ``top_p``; among equals lower ids come first.
    """
    if top_p >= 1:
        return probabilities_BV
    sorted_BV, order_BV = torch.sort(probabilities_BV, dim=-1, descending=True, stable=True)
    # A token belongs to it while those before it do not yet hold top_p; the first one always does.
    before_BV = torch.cumsum(sorted_BV, dim=-1) - sorted_BV
    kept_BV = torch.where(before_BV < top_p, sorted_BV, 0.0)
    kept_BV[:, 0] = sorted_BV[:, 0]
    return torch.zeros_like(probabilities_BV).scatter(-1, order_BV, kept_BV)


def draw(weights_BV: Tensor, noise_B: Tensor) -> Tensor:
    """Draw an index of each row in proportion to its weights by inverting the cumulative sum at ``noise`` in [0, 1).

    Weights are float64 and need not sum to 1. An index of weight 0 is never drawn: ``noise`` is at most 1 - 2^-52, so
    noise x total stays below the total, and the first sum above it belongs to a positive weight.
    """
    sums_BV = torch.cumsum(weights_BV, dim=-1)
    threshold_B = noise_B * sums_BV[:, -1]
    drawn_B = torch.searchsorted(sums_BV, threshold_B.unsqueeze(-1), right=True).squeeze(-1)
    # Only a row of NaN passes its end; the caller reports it, which an index error inside a kernel would not.
    return drawn_B.clamp_max(weights_BV.shape[1] - 1)


@contextmanager
def _sampling_mode(model: Model) -> Iterator[None]:
    """No autograd, and Megatron's evaluation mode, which turns activation recompute off; restored afterwards.

    ``torch.inference_mode`` would be wrong: Megatron caches its rotary table, and a table made there cannot be used in
    training.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _check_prompts(model: Model, prompts: Sequence[np.ndarray], max_response_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty")
        if int(np.min(prompt)) < 0 or int(np.max(prompt)) >= model.true_vocab_size:
            raise ValueError(
                f"prompt {index} has token ids outside of the model's vocabulary of {model.true_vocab_size}"
            )
        if len(prompt) + max_response_tokens > model.max_sequence_length:
            raise ValueError(
                f"prompt {index} of {len(prompt)} tokens and a response of up to {max_response_tokens} do not fit into "
                f"--max-position-embeddings {model.max_sequence_length}; raise it or lower --rollout-max-response-len"
            )
