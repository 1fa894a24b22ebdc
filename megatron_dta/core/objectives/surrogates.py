"""Defines the surrogates that policy-gradient objectives maximize, per token.

With r_t = exp(logprob - old_logprob) of a token, A_t its advantage, sg(x) the value of x without its gradient, and
clip(x) = min(max(x, 1 - eps_clip), 1 + eps_clip_high):

    clipped      min(r_t A_t, clip(r_t) A_t)                    PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300
    gspo         min(s A_t, clip(s) A_t)                        arXiv 2507.18071; s = exp(mean over the sequence of
                                                                log r_t), one ratio for all tokens of a sequence
    gspo-token   the same with s_t = sg(s) r_t / sg(r_t)        arXiv 2507.18071, for advantages that differ by token
    cispo        sg(clip(r_t)) A_t logprob_t                    arXiv 2506.13585: the weight is clipped, and no token
                                                                loses its gradient

eps_clip_high above eps_clip is DAPO's "clip-higher", arXiv 2503.14476. Dual clip, arXiv 1912.09729: for A < 0 the
first three are bounded below by dual_clip * A, dual_clip > 1, so that a token that has become far more likely cannot
dominate the step.

Every branch of min and clip is chosen by comparing values, and only the chosen branch is computed.

log r is bounded to +-20, as in verl, and beyond has no gradient: a recorded logprob so far from the trainer's is wrong,
and without the bound one such token with A < 0 would make every step infinite. A NaN of the model stays NaN.

All functions take and return tensors [..., T], 0 where a token is not trained, and reduce over time only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_LOG_RATIO = 20.0
"""Bound of the log ratio: exp(20) is 4.9e8."""


def bounded(log_ratio: Tensor) -> Tensor:
    """``log_ratio`` within its bounds, without a gradient outside."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio: 1 - low, 1 + high, and the dual bound of tokens with negative advantage."""

    low: float = 0.2
    high: float | None = None
    dual: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """(smallest, largest) ratio."""
        return 1 - self.low, 1 + (self.low if self.high is None else self.high)


@dataclass(frozen=True)
class Surrogate:
    """Values to maximize, per token; the ratio (detached); and where clipping has cut the gradient or the weight."""

    value: Tensor
    ratio: Tensor
    clipped: Tensor


# (logprobs, old_logprobs, advantages, loss_mask, bounds) -> surrogate
SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], Surrogate]


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, loss_mask: Tensor, clip: Clip) -> Surrogate:
    """The clipped surrogate of each token's own ratio."""
    return _clipped(logprobs - old, advantages, clip)


def gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, loss_mask: Tensor, clip: Clip) -> Surrogate:
    """The clipped surrogate of the sequence's ratio, the same for each of its tokens."""
    mean = _mean_over_time(logprobs - old, loss_mask)
    return _clipped(torch.where(loss_mask, mean, 0.0), advantages, clip)


def gspo_token(logprobs: Tensor, old: Tensor, advantages: Tensor, loss_mask: Tensor, clip: Clip) -> Surrogate:
    """The value of the sequence's ratio with the gradient of each token's own logprob."""
    mean = _mean_over_time((logprobs - old).detach(), loss_mask)
    return _clipped(torch.where(loss_mask, mean, 0.0) + logprobs - logprobs.detach(), advantages, clip)


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, loss_mask: Tensor, clip: Clip) -> Surrogate:
    """The weighted log-likelihood with a clipped weight."""
    ratio = bounded(logprobs - old).detach().exp()
    low, high = clip.bounds
    # Not clamp, because a NaN of the model must remain NaN.
    weight = torch.where(ratio > high, high, torch.where(ratio < low, low, ratio))
    return Surrogate(weight * advantages * logprobs, ratio, (ratio > high) | (ratio < low))


SURROGATES: dict[str, SurrogateFunction] = {
    "grpo": clipped,
    "ppo": clipped,
    "gspo": gspo,
    "gspo-token": gspo_token,
    "cispo": cispo,
}


def _mean_over_time(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean of the trained tokens of each sequence, [..., 1]; ``values`` are 0 elsewhere."""
    return values.sum(-1, keepdim=True) / loss_mask.sum(-1, keepdim=True).clamp_min(1)


def _clipped(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> Surrogate:
    """max(min(r A, clip(r) A), dual A if A < 0), and whether the gradient is cut.

    min(r A, clip(r) A) is clip(r) A exactly for A > 0 with r > high and for A < 0 with r < low, else r A.
    """
    log_ratio = bounded(log_ratio)
    ratio = log_ratio.detach().exp()
    low, high = clip.bounds
    above = (advantages > 0) & (ratio > high)
    below = (advantages < 0) & (ratio < low)
    # The constant ratio of the clipped branches; elsewhere its value is not used.
    bound = torch.where(above, torch.full_like(ratio, high), low)
    cut = above | below
    if clip.dual is not None:
        dual = (advantages < 0) & (ratio > clip.dual)
        bound = torch.where(dual, clip.dual, bound)
        cut = cut | dual
    free_ratio = torch.where(cut, torch.zeros_like(log_ratio), log_ratio).exp()
    return Surrogate(torch.where(cut, bound, free_ratio) * advantages, ratio, cut)
