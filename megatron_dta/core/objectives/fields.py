"""Defines the inputs and outputs of a loss, for one sequence or a batch of sequences.

An objective is an ordinary function of one sequence: of the logprob and the entropy of each of its tokens under the
weights being trained, and of its fields. It does not depend on trees. The engine gathers the logprobs of the unique
edges to every sequence through them, calls the objective, weights the result (``weights``) and adds the gradient back
to the edges.

Shapes: the last axis T is time within the sequence. Any axes before it are a batch, over which nothing is reduced, so
the results of a batch are those of its sequences alone. Shorter sequences are padded with ``loss_mask`` False. Values
where the mask is False are never used: they may be NaN, and they get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PairTerms:
    """Losses of pairs, divided among their sequences (Q of them).

    Attributes:
        gradient: float64 [Q], derivative of the sum of all pairs' losses by each logprob of the sequence.
        loss: float64 [Q], the sequence's half of its pairs' losses.
        metrics: means over the pairs.
    """

    gradient: np.ndarray
    loss: np.ndarray
    metrics: dict[str, float]


@dataclass
class LossFields:
    """Values of the tokens besides the model's own logprobs; all of shape [..., T]."""

    loss_mask: Tensor
    """bool: True where the token is trained."""
    advantages: Tensor | None = None
    """float: advantage of each token (policy-gradient objectives only)."""
    old_logprobs: Tensor | None = None
    """float: logprobs of the policy that sampled the tokens; None: the current ones, so every ratio is 1."""
    ref_logprobs: Tensor | None = None
    """float: logprobs of the reference policy, if a KL term needs them."""
    rollout_logprobs: Tensor | None = None
    """float: logprobs that the sampler recorded, if they are known."""
    old_values: Tensor | None = None
    """float: value of each token's state before the first step on the rollout batch (critics only)."""
    returns: Tensor | None = None
    """float: targets of the values (critics only)."""
    pair_gradient: Tensor | None = None
    """float: derivative of the loss of a sequence's pairs by each of its logprobs (pairwise objectives only)."""
    pair_loss: Tensor | None = None
    """float: each token's share of that loss (pairwise objectives only)."""


@dataclass
class TokenLosses:
    """Loss per token, which the caller weights and sums; 0 with gradient 0 where ``loss_mask`` is False."""

    loss: Tensor
    """[..., T], in the dtype of the logprobs."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """name -> [..., T], detached, 0 where the mask is False; the caller averages them over trained tokens."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """name -> [..., T], detached, 0 where the mask is False; the caller reports their maximum."""


LossFunction = Callable[[Tensor, Tensor, LossFields], TokenLosses]
# (sum of logprob - ref_logprob of every sequence [Q], pairs [K, 2]) -> the terms that ``pair_terms`` computes.
PairFunction = Callable[[np.ndarray, np.ndarray], PairTerms]


@dataclass(frozen=True)
class Objective:
    """A loss and its requirements. Call: (logprobs [..., T], entropy [..., T], fields) -> ``TokenLosses``."""

    name: str
    function: LossFunction
    requires: tuple[str, ...] = ()
    """Required fields of each rollout, in the form of ``load_rollouts(require=...)``."""
    needs_ref_logprobs: bool = False
    """Whether ``LossFields.ref_logprobs`` must be given."""
    is_policy_gradient: bool = False
    """Whether the loss uses advantages and a ratio to old logprobs."""
    needs_critic: bool = False
    """Whether the advantages come from a critic's values."""
    pair_function: PairFunction | None = None
    """For pairwise losses: the derivative of their loss by each sequence's logprobs."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, fields: LossFields) -> TokenLosses:
        return self.function(logprobs, entropy, fields)


@dataclass(frozen=True)
class SequenceLoss:
    """A loss function of whole sequences that returns one number, for trainers that bring their own losses.

    It is called with groups of sequences whose last tokens were computed together, and the step's loss is the sum of
    its values. It must therefore be additive: its value for a group is a sum over the sequences, with denominators that
    do not depend on the group.
    """

    function: Callable[[Tensor, Tensor, np.ndarray], Tensor]
    """(logprobs [B, T], entropy [B, T], sequences int64 [B]) -> scalar.

    Row b holds the trained tokens of sequence ``sequences[b]`` of the batch, in their order. Behind them the row is
    padded with values that must not be used.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, sequences: np.ndarray) -> Tensor:
        return self.function(logprobs, entropy, sequences)


def masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """``values`` where the mask is True, else 0.

    Applied to every input before any arithmetic: a NaN that is only masked in the result still turns the gradient into
    0 * NaN = NaN.
    """
    return torch.where(loss_mask, values, 0.0)
