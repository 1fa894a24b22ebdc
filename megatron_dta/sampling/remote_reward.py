"""``--reward-function remote``: a server gives the reward.

    POST URL   {"prompt": the prompt's record, "response": text, "response_token_ids": [ids]}
    answer     200 {"reward": 0.5}

A connection that fails, a reply that does not come in time or is cut, and the statuses 408, 429 and 5xx are tried again
after a growing pause, by the next server in turn. Another status, or a reply of another form, is told at once. There is
no proxy and no redirect. Each failed attempt is counted (``reward_retries``, ``reward_timeouts``).
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from megatron_dta.errors import InputError

MOST_REPLY_BYTES = 1 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
_TRANSIENT = (408, 429)


class _TransientError(Exception):
    """An attempt failed in a way that another may not."""


class RemoteReward:
    """A reward function; see on top.

    Attributes:
        counts: ``reward_retries`` (attempts after the first), ``reward_timeouts``.
    """

    is_concurrent = True

    def __init__(self, urls: Sequence[str], timeout_s: float = 60.0, attempts: int = 4) -> None:
        self._urls = [_checked(url) for url in urls]
        if not self._urls:
            raise InputError("--reward-function remote needs --reward-server-url http://HOST:PORT/PATH")
        self._timeout_s, self._attempts = timeout_s, attempts
        self._turn, self._lock = itertools.count(), threading.Lock()
        self.counts = {"reward_retries": 0, "reward_timeouts": 0}

    def __call__(self, prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
        """The server's reward; ``InputError`` says why there is none."""
        body = json.dumps({"prompt": prompt, "response": response, "response_token_ids": response_token_ids}).encode()
        with self._lock:
            turn = next(self._turn)
        for attempt in range(self._attempts):
            url = self._urls[(turn + attempt) % len(self._urls)]
            if attempt:
                self._count("reward_retries")
                time.sleep(min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S))
            try:
                return _reward_in(self._post(url, body), url)
            except TimeoutError:
                self._count("reward_timeouts")
                reason = f"no reply within {self._timeout_s:g} s"
            except _TransientError as error:
                reason = str(error)
            except (OSError, http.client.HTTPException) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"reward server {url.geturl()}: failed {self._attempts} times, the last time: {reason}")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _post(self, url: SplitResult, body: bytes) -> bytes:
        """One attempt, within the time-out in all."""
        deadline = time.monotonic() + self._timeout_s
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname, url.port, timeout=self._timeout_s)
        try:
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            # The socket's time-out counts from byte to byte: what drips is ended here.
            connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
            socket = connection.sock
            reply = connection.getresponse()
            parts: list[bytes] = []
            while part := reply.read1(1 << 16):
                parts.append(part)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if sum(map(len, parts)) > MOST_REPLY_BYTES:
                    raise InputError(f"reward server {url.geturl()}: the reply is longer than {MOST_REPLY_BYTES} bytes")
                socket.settimeout(left)
        finally:
            connection.close()
        content = b"".join(parts)
        if reply.status >= 500 or reply.status in _TRANSIENT:
            raise _TransientError(f"status {reply.status}: {_shown(content)}")
        if reply.status != 200:
            raise InputError(f"reward server {url.geturl()}: refuses with {reply.status}: {_shown(content)}")
        length = reply.getheader("Content-Length")
        if length is not None and length.isdecimal() and int(length) != len(content):
            raise _TransientError(f"the reply is cut after {len(content)} of {length} bytes")
        return content


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"--reward-server-url {url}: must be like http://HOST:PORT/PATH")
    return parts


def _reward_in(content: bytes, url: SplitResult) -> float:
    where = f"reward server {url.geturl()}"
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: the reply is not JSON: {_shown(content)}") from None
    value = found.get("reward") if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f'{where}: the reply must be like {{"reward": 0.5}}, got {_shown(content)}')
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise InputError(f"{where}: the reward must be finite, got {_shown(content)}")
    return reward


def _shown(content: bytes) -> str:
    text = " ".join(content[:400].decode(errors="replace").split())
    return repr(text[:200])
