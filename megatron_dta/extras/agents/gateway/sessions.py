"""Opens and closes sessions, finds them by their keys, and limits what they may use.

A key is ``sk-ID-SECRET``. The id finds the session and the secret is compared in constant time; ids that do not exist
are compared, too. A closed session's key is as good as none.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_dta.extras.agents.gateway.errors import RequestError, exhausted, refuse
from megatron_dta.extras.agents.gateway.session import Session
from megatron_dta.training.config import AgentConfig


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of a gateway.

    Attributes:
        flags: those that begin with ``gateway_``, and the parsers.
        model_name: what /v1/models lists; every name is accepted in requests.
        max_positions: the longest sequence.
        max_sessions: open at the same time.
        max_concurrent: answers that a session samples at the same time.
    """

    flags: AgentConfig
    model_name: str
    max_positions: int
    max_sessions: int = 1024
    max_concurrent: int = 32


class Sessions:
    """The open sessions. Threads may call every method."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._open: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._no_secret = secrets.token_urlsafe(24)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, number: int, group_id: str = "0") -> tuple[Session, str]:
        """Open a session; returns it and its key.

        Args:
            number: decides the random numbers of its answers.

        Raises:
            RequestError: too many are open.
        """
        with self._lock:
            if len(self._open) >= self._settings.max_sessions:
                raise RequestError(429, f"{len(self._open)} sessions are open, the most there may be; close some")
            session = Session(secrets.token_hex(8), number, secrets.token_urlsafe(24), group_id)
            self._open[session.session_id] = session
        return session, f"sk-{session.session_id}-{session.secret}"

    def find(self, key: str | None) -> Session:
        """The open session of a key; ``RequestError`` 401 without telling which part of the key is wrong."""
        _, _, rest = (key or "").partition("sk-")
        session_id, _, secret = rest.partition("-")
        session = self._open.get(session_id)
        expected = self._no_secret if session is None else session.secret
        is_equal = hmac.compare_digest(secret.encode("utf-8", "replace"), expected.encode())
        if session is None or not is_equal or not session.is_open:
            raise RequestError(401, "the API key is missing or is not the key of an open session")
        return session

    def close(self, session: Session) -> None:
        """Close a session: its key is invalid from now on. May be called twice."""
        with self._lock:
            session.is_open = False
            self._open.pop(session.session_id, None)

    def reserve(self, session: Session, choices: int) -> Callable[[], None]:
        """Count ``choices`` answers as running; returns what ends them. ``RequestError`` 429 beyond a limit."""
        limits = self._settings.flags
        with self._lock:
            most = min(self._settings.max_concurrent, limits.gateway_max_calls)
            if choices > most:
                raise refuse(f"n: a call may have {most} answers, not {choices}; call again for more")
            if session.running + choices > self._settings.max_concurrent:
                raise RequestError(429, f"the session samples {session.running} answers already; wait for one of them")
            left = limits.gateway_max_calls - len(session.calls)
            if choices > left:
                raise exhausted(f"may have {left} more calls of {limits.gateway_max_calls} (--gateway-max-calls)")
            if choices > left - session.running:
                raise RequestError(429, f"the session samples its last {session.running} answers; wait for them")
            session.running += choices

        def end() -> None:
            with self._lock:
                session.running -= choices

        return end

    def set_reward(self, session: Session, reward: float, call_id: str | None) -> None:
        """Set the reward of a session or, with ``call_id``, of one of its calls.

        Raises:
            RequestError: the reward is not finite, or the session has no such call.
        """
        if not np.isfinite(reward):
            raise RequestError(400, f"reward: {reward} is not finite")
        if call_id is None:
            session.reward = reward
            return
        call = session.call_of(call_id)
        if call is None:
            raise RequestError(404, "call: the session has no such call")
        session.rewards[call.number] = reward
