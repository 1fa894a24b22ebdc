"""Draws the next token of each row from its hidden state and computes the token's logprob.

The logprob is log-softmax(logits / temperature) over the full vocabulary in float32 (float64 for a float64 model), as
in the trainer, so importance ratios are 1 at the sampler's weights. With ``top_p`` below 1 a token is drawn from the
renormalized nucleus, but its logprob is still that of the full distribution. Greedy decoding (temperature 0) returns
the logprobs of temperature 1.

**Ids without text.** A model's vocabulary may be larger than its tokenizer's (``SamplingParams.vocab_size``); the ids
beyond are never drawn. As with a nucleus, the logprob of what is drawn stays that of the full distribution, so ratios
are still 1. A mask in the trainer would train another model than the one that is exported.

A token is drawn with a uniform number keyed by (seed, iteration, key of the sequence, position), so a sample does not
depend on its batch. (Matrix products of another shape may round the last bit differently, which changes a draw only if
its number falls on that bit.) Under tensor parallelism all ranks of a group draw the same tokens.

On a GPU two kernels draw the tokens (``dta_kernels.logprobs.draw_tokens``), except from a nucleus. A tensor group then
exchanges a few sums a row. In all other cases it gathers the logits.

Legend: B rows, V vocabulary, C hidden size.
"""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dta.core.model.kernels import draw_by_kernels
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.sampling.params import SamplingParams

# Maximum number of logits computed at once, which bounds the memory. The kernels need only the logits, and each part
# reads the output weight again, so their parts are larger.
_LOGIT_ELEMENTS, _KERNEL_LOGIT_ELEMENTS = 2**24, 2**27
# Without the kernels: logprobs, probabilities in float64, their order and sums, and what sorting them needs.
_BYTES_WITHOUT_KERNELS = 72

_DRAW_BLOCK, _YOUNG_OBJECTS = 128, 20_000


def next_tokens(
    model: Model, hidden_BC: Tensor, noise_B: Tensor, params: SamplingParams, kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row; returns (tokens int64 [B], their logprobs [B]).

    kernels: use the Triton kernels where they apply; not for a float64 model.
    """
    num_drawn = min(params.vocab_size or model.true_vocab_size, model.true_vocab_size)
    kernels = kernels and (params.top_p >= 1 or params.temperature == 0)
    rows = max(1, (_KERNEL_LOGIT_ELEMENTS if kernels else _LOGIT_ELEMENTS) // model.true_vocab_size)
    tokens, logprobs = [], []
    for hidden, noise in zip(hidden_BC.split(rows), noise_B.split(rows), strict=True):
        if kernels:
            token, logprob = draw_by_kernels(model, hidden, noise, params.temperature, num_drawn)
        else:
            token, logprob = _draw_from_logits(model, hidden, noise, params, num_drawn)
        if model.config.batch_invariant_mode:  # bit for bit, only the trainer's own logprobs will do
            logprob = model.token_logprobs(hidden, token, params.temperature or 1.0)
        tokens.append(token)
        logprobs.append(logprob)
    return (tokens[0], logprobs[0]) if len(tokens) == 1 else (torch.cat(tokens), torch.cat(logprobs))


def _draw_from_logits(
    model: Model, hidden_BC: Tensor, noise_B: Tensor, params: SamplingParams, num_drawn: int
) -> tuple[Tensor, Tensor]:
    """``next_tokens`` in plain PyTorch."""
    logits = model.logits(hidden_BC)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.temperature not in (0, 1):
        logits = logits / params.temperature
    logprobs_BV = torch.log_softmax(logits, dim=-1)[:, :num_drawn]
    if params.temperature == 0:
        token = first_argmax(logprobs_BV)
    else:
        weights = logprobs_BV.double().exp()
        if params.top_p < 1:  # ids that are never drawn do not count
            weights = weights / weights.sum(-1, keepdim=True)
        token = draw(nucleus(weights, params.top_p), noise_B)
    return token, logprobs_BV.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def most_logit_bytes(vocab_size: int, element_size: int, ranks: int, num_rows: int) -> int:
    """Maximum memory that ``next_tokens`` needs at once for ``num_rows`` rows on a tensor group of ``ranks``."""
    most = num_rows * vocab_size
    with_kernels = min(most, max(_KERNEL_LOGIT_ELEMENTS, vocab_size)) * element_size // ranks
    # A rank's own logits, those of all ranks one after the other, and side by side.
    copies = 1 if ranks == 1 else 3
    without = min(most, max(_LOGIT_ELEMENTS, vocab_size)) * (_BYTES_WITHOUT_KERNELS + element_size * copies)
    return max(with_kernels, without)


def first_argmax(scores_BV: Tensor) -> Tensor:
    """Index of each row's largest score, int64 [B]; of ties the lowest, which ``torch.argmax`` does not guarantee."""
    is_largest = scores_BV == scores_BV.amax(dim=-1, keepdim=True)
    first_B = is_largest.cumsum(dim=-1).eq(0).sum(dim=-1)
    return first_B.clamp_max(scores_BV.shape[1] - 1)  # a row of NaN has no largest score


def nucleus(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """The probabilities with all tokens outside the nucleus set to 0 (not renormalized).

    The nucleus (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020) is the smallest set of most
    likely tokens whose total probability is at least ``top_p``; among ties lower ids come first.
    """
    if top_p >= 1:
        return probabilities_BV
    sorted_BV, order_BV = torch.sort(probabilities_BV, dim=-1, descending=True, stable=True)
    # A token is in the nucleus if the tokens before it have less than top_p; the first one always is.
    before_BV = torch.cumsum(sorted_BV, dim=-1) - sorted_BV
    kept_BV = torch.where(before_BV < top_p, sorted_BV, 0.0)
    kept_BV[:, 0] = sorted_BV[:, 0]
    return torch.zeros_like(probabilities_BV).scatter(-1, order_BV, kept_BV)


def draw(weights_BV: Tensor, noise_B: Tensor) -> Tensor:
    """Draw an index of each row in proportion to its weights by inverting the cumulative sum at ``noise`` in [0, 1).

    Weights are float64 and need not sum to 1. An index of weight 0 is never drawn: ``noise`` is at most 1 - 2^-52, so
    noise x total stays below the total, and the first sum above it belongs to a positive weight.

    The search finds a block of indices first and then the index in it, because cumulative sums over whole rows would
    take longer on a GPU than the logits.
    """
    num_rows, size = weights_BV.shape
    missing = -size % _DRAW_BLOCK
    padded_BV = F.pad(weights_BV, (0, missing)) if missing else weights_BV
    weights_BKW = padded_BV.view(num_rows, -1, _DRAW_BLOCK)
    sums_BK = weights_BKW.sum(dim=-1).cumsum(dim=-1)
    threshold_B1 = noise_B.unsqueeze(-1) * sums_BK[:, -1:]
    # Only a row of NaN can exceed the last block; the caller reports it.
    block_B1 = torch.searchsorted(sums_BK, threshold_B1, right=True).clamp_max(sums_BK.shape[1] - 1)
    before_B1 = F.pad(sums_BK, (1, 0)).gather(1, block_B1)
    block_BW = weights_BKW.gather(1, block_B1.unsqueeze(-1).expand(-1, -1, _DRAW_BLOCK)).squeeze(1)
    sums_BW = block_BW.cumsum(dim=-1)
    # Rounding must not move the remainder past the end of the block.
    below_B1 = torch.nextafter(sums_BW[:, -1:], torch.zeros_like(threshold_B1))
    rest_B1 = torch.minimum(threshold_B1 - before_B1, below_B1)
    drawn_B1 = block_B1 * _DRAW_BLOCK + torch.searchsorted(sums_BW, rest_B1, right=True)
    return drawn_B1.squeeze(-1).clamp_max(size - 1)


class EvaluationMode:
    """A block without autograd and with the model in evaluation mode, which turns activation recompute off.

    The mode stays until ``leave``, since changing it visits every module, which takes milliseconds. So long only young
    objects are looked through for garbage: requests have no cycles, and a device would wait for a look at all of them.
    ``torch.inference_mode`` cannot be used: Megatron caches its rotary table, and a table created there cannot be used
    in training.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._was_training, self._no_grad = model, False, torch.no_grad()
        self._thresholds: tuple[int, ...] | None = None

    def __enter__(self) -> None:
        if self._thresholds is None:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(self._thresholds[0] and _YOUNG_OBJECTS, _YOUNG_OBJECTS, _YOUNG_OBJECTS)
        if self._model.training:
            self._was_training = True
            self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self._no_grad.__exit__(*error)

    def leave(self) -> None:
        """Restore the mode that the model had before."""
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
            self._thresholds = None
        if self._was_training:
            self._was_training = False
            self._model.train()
