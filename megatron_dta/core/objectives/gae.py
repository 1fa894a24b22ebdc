"""Computes generalized advantage estimates (arXiv 1506.02438) over the trained tokens of each sequence.

    delta_t = r_t + gamma V_(t+1) - V_t          A_t = delta_t + gamma lambda A_(t+1)          R_t = A_t + V_t

t runs over the trained tokens only: tokens of a tool or a user in between are part of the next state, not an action.
Each part of a trajectory (equal ``trajectory_id``) is an episode of its own, which receives with its last trained token
what the trajectory still receives afterwards.
V_t is the value of the state before token t; after the last trained token, value and advantage are 0. Sequences that
share tokens share their values there, but have their own rewards and therefore their own advantages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from megatron_dta.core.objectives.weights import trajectory_names
from megatron_dta.core.rollouts.record import Rollout

_ROUNDING = 1e-12


def token_rewards(rollout: Rollout) -> np.ndarray:
    """Reward received with each token, float64 [T], 0 where a token is not trained.

    The reward of a segment belongs to the last trained token before the segment's end (or, if there is none, to the
    first one after it). A plain reward belongs to the last trained token. The sum over the sequence is the total
    reward received.
    """
    trained = np.flatnonzero(rollout.loss_mask)
    rewards = np.zeros(len(rollout))
    if rollout.segment_rewards is None or rollout.segment_ends is None:
        rewards[trained[-1]] = rollout.reward
        return rewards
    index = np.maximum(np.searchsorted(trained, rollout.segment_ends, side="left") - 1, 0)
    np.add.at(rewards, trained[index], rollout.segment_rewards.astype(np.float64))
    return rewards


def received_rewards(rollouts: Sequence[Rollout], penalties: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
    """``token_rewards`` less the penalties of each token, float [T] of each rollout."""
    rewards = [token_rewards(rollout) for rollout in rollouts]
    if penalties is None:
        return rewards
    for rollout, reward, penalty, later in zip(
        rollouts, rewards, penalties, later_penalties(rollouts, penalties), strict=True
    ):
        reward -= penalty
        reward[np.flatnonzero(rollout.loss_mask)[-1]] -= later
    return rewards


def later_penalties(rollouts: Sequence[Rollout], penalties: Sequence[np.ndarray]) -> np.ndarray:
    """Sum of the penalties of the parts of each rollout's trajectory that follow it in ``rollouts``, float64 [Q]."""
    names, later = trajectory_names(rollouts), np.zeros(len(rollouts))
    sums: dict[Hashable, float] = {}
    for i in reversed(range(len(rollouts))):
        later[i] = sums.get(names[i], 0.0)
        sums[names[i]] = later[i] + float(penalties[i].sum())
    return later


def generalized_advantages(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray],
    gamma: float,
    lam: float,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages and returns of each sequence, float64 [T], 0 where a token is not trained.

    Args:
        rewards, values: float [T] of each sequence; those of tokens that are not trained are not used.
    """
    trained = [np.flatnonzero(mask) for mask in loss_masks]
    longest = max((len(where) for where in trained), default=0)
    # Sequences are aligned at their ends, so one loop over time serves all; the column after the end stays 0.
    shape = len(trained), longest + 1
    reward_QT, value_QT, advantage_QT = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for q, where in enumerate(trained):
        columns = slice(longest - len(where), longest)
        reward_QT[q, columns], value_QT[q, columns] = rewards[q][where], values[q][where]
    for t in range(longest - 1, -1, -1):
        delta = reward_QT[:, t] + gamma * value_QT[:, t + 1] - value_QT[:, t]
        advantage_QT[:, t] = delta + gamma * lam * advantage_QT[:, t + 1]
    advantages = [np.zeros(len(mask)) for mask in loss_masks]
    returns = [np.zeros(len(mask)) for mask in loss_masks]
    for q, where in enumerate(trained):
        columns = slice(longest - len(where), longest)
        advantages[q][where] = advantage_QT[q, columns]
        returns[q][where] = advantage_QT[q, columns] + value_QT[q, columns]
    return advantages, returns


def whiten(advantages: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Mean 0 and sample variance 1 over the trained tokens of all sequences together."""
    values = np.concatenate([advantage[mask] for advantage, mask in zip(advantages, loss_masks, strict=True)])
    mean, scale = mean_and_scale(values)
    return [
        np.where(mask, (advantage - mean) / scale, 0.0) for advantage, mask in zip(advantages, loss_masks, strict=True)
    ]


def mean_and_scale(values: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """Mean and divisor of whitening; the divisor is infinite if the values differ by rounding only.

    The divisor is the sample standard deviation, as in verl and slime: with equal weights, the squares are divided by
    n - 1.
    """
    weights = np.full(len(values), 1 / len(values)) if weights is None else weights / weights.sum()
    mean = np.sum(weights * values)
    freedom = 1 - np.sum(weights**2)
    std = np.sqrt(np.sum(weights * (values - mean) ** 2) / freedom) if freedom > _ROUNDING else 0.0
    # The mean of equal values is not exactly their value, and a small divisor would turn the difference into a signal.
    return mean, std + 1e-8 if std > _ROUNDING * np.abs(values).max() else np.inf
