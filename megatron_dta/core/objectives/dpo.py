"""Direct preference optimization (arXiv 2305.18290) on pairs that share a prompt.

With S_q = sum over the trained tokens of sequence q of (logprob - ref_logprob), a pair of chosen c and rejected r has

    z = beta (S_c - S_r)        loss = -log sigmoid(z)

The loss connects two sequences, and in depth-first order a branch of the first may have run backward before the second
has run forward. But the gradient needs only one number from the other sequence:

    d loss / d logprob = -beta sigmoid(-z)    for every token of c, minus that for those of r

One pass without gradients over the same plan therefore computes S of all sequences, ``pair_terms`` turns them into a
coefficient for each sequence, and the training pass is a weighted likelihood. This is exact, keeps one path in flight,
and allows the two sequences of a pair on different ranks. A coefficient is valid only for the weights of its own step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.objectives.advantages import group_numbers
from megatron_dta.core.objectives.fields import LossFields, PairTerms, TokenLosses, masked

PAIR_CHOICES = ("best-worst", "all")


def preference_pairs(rewards: Sequence[float], group_ids: Sequence[str], choice: str = "best-worst") -> np.ndarray:
    """Pairs (chosen, rejected) of sequences of one group whose rewards differ, int64 [K, 2].

    best-worst: one pair a group, the first sequence with the highest reward and the first with the lowest; all: every
    pair.
    """
    values, group = np.asarray(rewards, np.float64), group_numbers(group_ids)
    pairs = []
    for number in range(group.max(initial=-1) + 1):
        members = np.flatnonzero(group == number)
        if choice == "best-worst":
            best, worst = members[values[members].argmax()], members[values[members].argmin()]
            pairs += [(best, worst)] if values[best] > values[worst] else []
        elif choice == "all":
            pairs += [(a, b) for a in members for b in members if values[a] > values[b]]
        else:
            raise InputError(f"--dpo-pairs {choice}: choose from {', '.join(PAIR_CHOICES)}")
    return np.array(pairs, np.int64).reshape(-1, 2)


def pair_terms(sums: np.ndarray, pairs: np.ndarray, *, beta: float) -> PairTerms:
    """Losses of pairs [K, 2] from S [Q], as derivatives with respect to each sequence's logprobs; see the module."""
    chosen, rejected = pairs[:, 0], pairs[:, 1]
    z = beta * (sums[chosen] - sums[rejected])
    losses = np.logaddexp(0, -z)
    slope = -beta * np.exp(-np.logaddexp(0, z))  # the sigmoid of -z
    gradient, loss = np.zeros(len(sums)), np.zeros(len(sums))
    np.add.at(gradient, chosen, slope)
    np.subtract.at(gradient, rejected, slope)
    for side in (chosen, rejected):
        np.add.at(loss, side, losses / 2)
    metrics = {
        "dpo_margin": float(z.mean()),
        "dpo_accuracy": float((z > 0).mean()),
        "dpo_chosen_reward": float(beta * sums[chosen].mean()),
        "dpo_rejected_reward": float(beta * sums[rejected].mean()),
    }
    return PairTerms(gradient, loss, metrics)


def dpo_loss(logprobs: Tensor, entropy: Tensor, fields: LossFields) -> TokenLosses:
    """Loss per token [..., T]: its value is the token's share of the pairs' losses, its gradient ``pair_gradient``."""
    if fields.pair_gradient is None or fields.pair_loss is None:
        raise InputError("--objective dpo needs pairs of sequences")
    mask = fields.loss_mask
    present = masked(logprobs, mask)
    gradient, loss = masked(fields.pair_gradient, mask), masked(fields.pair_loss, mask)
    # The difference is 0 and only carries the gradient; a NaN of the model remains NaN.
    return TokenLosses(gradient * (present - present.detach()) + loss, {"entropy": masked(entropy.detach(), mask)})
