"""The next token of each row from its hidden state: logprobs, nucleus, draw.

**Logprobs are the trainer's.** The recorded logprob of a token is log-softmax(logits / temperature) over the *full*
vocabulary in float32 (float64 for a float64 model), the same expression as the trainer's. With ``top_p`` below 1 the
token was drawn from the renormalized nucleus, whose logprobs are larger by -log(mass of the nucleus): the trainer then
optimizes the untruncated distribution with slightly off-policy samples, and importance ratios are still 1 at the
sampler's weights. Recording the truncated logprobs instead would make every ratio start away from 1 and clip for no
reason. Greedy decoding (temperature 0) records the logprobs of temperature 1.

**A sample does not depend on its batch.** The uniform number that draws a token is keyed by (seed, iteration, key of
the sequence, position), so the same sequence comes out alone, in a batch, in another order or after a restart. (Matrix
products of other shapes may round differently in the last bit, which moves a draw only if its number falls on that
bit.)

Under tensor parallelism the ranks of a group gather the logits and draw the same tokens.

On a GPU two kernels do all of it (``dta_kernels.logprobs.draw_tokens``), but for a nucleus, which needs a sorted row.

Legend: B rows, V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dta.model.kernels import draw_by_kernels
from megatron_dta.model.parallel.staged_model import Model
from megatron_dta.sampling.params import SamplingParams

# Bound of the memory of one pass: logits whose softmax exists at once.
_LOGIT_ELEMENTS = 2**24

# The kernels need no more than the logits; each part reads the output weight again.
_KERNEL_LOGIT_ELEMENTS = 2**27

_DRAW_BLOCK = 128


def next_tokens(
    model: Model, hidden_BC: Tensor, noise_B: Tensor, params: SamplingParams, kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row; returns (int64 [B], its logprob [B]).

    kernels: use the Triton kernels for what they do; not for a float64 model.
    """
    kernels = kernels and (params.top_p >= 1 or params.temperature == 0)
    rows = max(1, (_KERNEL_LOGIT_ELEMENTS if kernels else _LOGIT_ELEMENTS) // model.true_vocab_size)
    tokens, logprobs = [], []
    for hidden, noise in zip(hidden_BC.split(rows), noise_B.split(rows), strict=True):
        logits = model.logits(hidden)
        if kernels:
            drawn = draw_by_kernels(logits, noise, params.temperature)
            tokens.append(drawn[0])
            logprobs.append(drawn[1])
            continue
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if params.temperature not in (0, 1):
            logits = logits / params.temperature
        logprobs_BV = torch.log_softmax(logits, dim=-1)
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

    First a block of indices is found and then the index in it: running sums over a whole row would take a GPU longer
    than the logits do, sums of blocks and the running sum of one of them are a single reading of the row.
    """
    num_rows, size = weights_BV.shape
    missing = -size % _DRAW_BLOCK
    padded_BV = F.pad(weights_BV, (0, missing)) if missing else weights_BV
    weights_BKW = padded_BV.view(num_rows, -1, _DRAW_BLOCK)
    sums_BK = weights_BKW.sum(dim=-1).cumsum(dim=-1)
    threshold_B1 = noise_B.unsqueeze(-1) * sums_BK[:, -1:]
    # Only a row of NaN passes its end; the caller reports it, which an index error inside a kernel would not.
    block_B1 = torch.searchsorted(sums_BK, threshold_B1, right=True).clamp_max(sums_BK.shape[1] - 1)
    before_B1 = F.pad(sums_BK, (1, 0)).gather(1, block_B1)
    own_BW = weights_BKW.gather(1, block_B1.unsqueeze(-1).expand(-1, -1, _DRAW_BLOCK)).squeeze(1)
    sums_BW = own_BW.cumsum(dim=-1)
    # Rounding must not carry the rest past the block.
    below_B1 = torch.nextafter(sums_BW[:, -1:], torch.zeros_like(threshold_B1))
    rest_B1 = torch.minimum(threshold_B1 - before_B1, below_B1)
    drawn_B1 = block_B1 * _DRAW_BLOCK + torch.searchsorted(sums_BW, rest_B1, right=True)
    return drawn_B1.squeeze(-1).clamp_max(size - 1)


@contextmanager
def sampling_mode(model: Model) -> Iterator[None]:
    """No autograd, and Megatron's evaluation mode, which turns activation recompute off; restored afterwards.

    A model that is in that mode is left alone: changing it goes through every module, which takes milliseconds.

    ``torch.inference_mode`` would be wrong: Megatron caches its rotary table, and a table made there cannot be used in
    training.
    """
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            model.train()
