"""Turns a session's tree into rollouts in which every sampled token is trained exactly once.

A rollout is a path from the start to a call that no other call continues (a leaf). An answer on several paths is
trained on the first of them and is context on the others. All rollouts of a session share its reward and its
``trajectory_id``. If calls have rewards of their own, every call becomes a rollout and a trajectory of its own, with
its own reward or else the session's. Shared prefixes cost nothing in either form, since training computes the prefix
tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.agents.gateway.session import Call, Session


def leaves(calls: Sequence[Call]) -> list[Call]:
    """The calls that no other call continues, in order."""
    continued = {id(call.parent) for call in calls}
    return [call for call in calls if id(call) not in continued]


def session_rollouts(session: Session, reward: float | None) -> list[Rollout]:
    """The rollouts of a closed session.

    Args:
        reward: the session's reward; None only if every call has its own.

    Raises:
        ValueError: a call has no reward.
    """
    if not session.rewards:
        if reward is None:
            raise ValueError("the session has no reward")
        seen: set[int] = set()
        return [_rollout(session, leaf, _path(leaf), reward, seen) for leaf in leaves(session.calls)]
    rollouts = []
    for call in session.calls:
        call_reward = session.rewards.get(call.number, reward)
        if call_reward is None:
            raise ValueError(f"call {call.call_id} has no reward and neither has the session")
        rollouts.append(_rollout(session, call, [call], call_reward, set(), f"{session.session_id}/{call.number}"))
    return rollouts


def _path(leaf: Call) -> list[Call]:
    """The calls whose answers are on the path to ``leaf``, the first one first."""
    path, call = [], leaf
    while call is not None:
        path.append(call)
        call = call.parent
    return path[::-1]


def _rollout(
    session: Session, end: Call, trained: Sequence[Call], reward: float, seen: set[int], trajectory: str | None = None
) -> Rollout:
    """The tokens up to the end of ``end``; answers of ``trained`` are trained unless their number is in ``seen``."""
    loss_mask, logprobs = np.zeros(end.length, bool), np.zeros(end.length, np.float32)
    for call in trained:
        if call.number not in seen:
            seen.add(call.number)
            loss_mask[call.prompt_length : call.length] = True
            logprobs[call.prompt_length : call.length] = call.logprobs
    return Rollout(
        token_ids=end.token_ids(),
        loss_mask=loss_mask,
        reward=reward,
        logprobs=logprobs,
        group_id=session.group_id,
        trajectory_id=trajectory or session.session_id,
        policy_version=end.policy_version,
    )


@dataclass(frozen=True)
class SessionSizes:
    """Sizes of a session.

    Attributes:
        branches: leaves of its tree.
        trained_tokens: sampled tokens, each once.
        stored_tokens: tokens that the tree holds.
        row_tokens: tokens if every call were a row of prompt and answer.
        reasons: number of branches by what began them (``branches.REASONS``).
    """

    calls: int
    branches: int
    trained_tokens: int
    stored_tokens: int
    row_tokens: int
    tokenized_tokens: int
    reused_tokens: int
    abandoned_calls: int
    crossed_borders: int
    reasons: Counter[str]

    @classmethod
    def of(cls, session: Session) -> SessionSizes:
        calls, counts = session.calls, session.counts
        return cls(
            len(calls),
            len(leaves(calls)),
            sum(len(call.output) for call in calls),
            session.num_tokens,
            sum(call.length for call in calls),
            counts.tokenized_tokens,
            counts.reused_tokens,
            counts.abandoned_calls,
            counts.crossed_borders,
            Counter(session.branches.values()),
        )


def context_of(call: Call) -> np.ndarray:
    """The tokens of a call's prompt after the answer that it continues, int32."""
    return call.token_ids(call.prompt_length)[0 if call.parent is None else call.parent.length :]


def session_record(session: Session, reward: float | None) -> dict[str, Any]:
    """The tree of a session as plain values, for files that reports read."""
    return {
        "session": session.session_id,
        "group_id": session.group_id,
        "reward": reward,
        "calls": [
            {
                "call": call.call_id,
                "parent": None if call.parent is None else call.parent.number,
                "prompt_length": call.prompt_length,
                "context": context_of(call).tolist(),
                "output": call.output.tolist(),
                "finish": call.finish,
                "tools": list(call.tools),
                "branch": session.branches.get(call.number),
                "reward": session.rewards.get(call.number),
                "seconds": round(call.seconds, 4),
            }
            for call in session.calls
        ],
    }
