"""Cuts rollouts into training samples: one for the whole trajectory, or one for each of its turns.

A turn is a run of trained tokens. Its sample contains every token up to the end of the turn and trains only the turn,
so the samples of one trajectory are prefixes of each other. They share a ``trajectory_id``, by which group statistics
count the reward of the trajectory once.

With ``segment_rewards``, a sample has the rewards that were still to come when its first trained token was sampled:
those of earlier turns are 0, and those received after its end are added to its last node. In the same way a plain
reward, which comes at the end of the trajectory, is the reward of every sample.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_dta.core.rollouts.record import Rollout

SAMPLE_GRANULARITIES = ("trajectory", "turn")


def mask_runs(loss_mask: np.ndarray) -> np.ndarray:
    """[runs, 2] begin and end of each run of True in ``loss_mask`` [T], in order."""
    edges = np.diff(loss_mask.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(edges).reshape(-1, 2)


def cut_turns(rollout: Rollout, trajectory_id: str, turns: np.ndarray | None = None) -> list[Rollout]:
    """One sample per turn; ``turns`` [n, 2] (default: the runs of the loss mask) where two turns may touch.

    ``trajectory_id`` is given to samples of a rollout that has none of its own.
    """
    samples = []
    for begin, end in mask_runs(rollout.loss_mask) if turns is None else turns:
        loss_mask = np.zeros(end, bool)
        loss_mask[begin:end] = True
        samples.append(replace(_head(rollout, end, loss_mask), trajectory_id=rollout.trajectory_id or trajectory_id))
    return samples


def cut_length(rollout: Rollout, max_length: int) -> Rollout | None:
    """The first ``max_length`` tokens; None where no trained token is left among them."""
    if len(rollout) <= max_length:
        return rollout
    loss_mask = rollout.loss_mask[:max_length]
    return _head(rollout, max_length, loss_mask) if loss_mask.any() else None


def _head(rollout: Rollout, end: int, loss_mask: np.ndarray) -> Rollout:
    """The first ``end`` tokens with every per-token field cut to this length."""
    length, changed = len(rollout), {"loss_mask": loss_mask, **_head_of_path(rollout, loss_mask)}
    for name in ("token_ids", "advantages", "logprobs", "routed_experts", "token_versions"):
        values = getattr(rollout, name)
        if values is not None:
            changed[name] = values[: len(values) // length * end]
    if rollout.token_versions is not None:
        changed["policy_version"] = None  # the oldest of the versions that remain
    return replace(rollout, **changed)


def _head_of_path(rollout: Rollout, loss_mask: np.ndarray) -> dict[str, np.ndarray]:
    """The nodes of a sampled tree within the first ``len(loss_mask)`` tokens, the last of them cut there."""
    ends, end = rollout.segment_ends, len(loss_mask)
    if ends is None:
        return {}
    nodes = int(np.searchsorted(ends, end)) + 1
    path = {"segment_ends": np.minimum(ends[:nodes], end), "branches": rollout.branches[:nodes]}
    if rollout.segment_rewards is not None:
        rewards = rollout.segment_rewards.astype(np.float64)
        first_trained = int(loss_mask.argmax())
        if rollout.loss_mask[:first_trained].any():
            rewards[ends <= first_trained] = 0
        rewards[nodes - 1] += rewards[nodes:].sum()
        path["segment_rewards"] = rewards[:nodes].astype(np.float32)
    return path
