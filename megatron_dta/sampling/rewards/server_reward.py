"""Asks a server for the reward of a response (``--reward-function remote``).

    POST URL   {"prompt": the prompt's record, "response": text, "response_token_ids": [ids]}
    answer     200 {"reward": 0.5}

After a failure that may pass (``common.http.session``) the request is sent again to the next server after a growing
pause. Any other status, and a reply of another form, is an error at once. Failed attempts are counted
(``reward_retries``, ``reward_timeouts``).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dta.common.http.replies import (
    RefusedError,
    TimedOutError,
    TransientFailureError,
    as_float,
    field_of,
    message_in,
    parse_json,
    shown,
)
from megatron_dta.common.http.session import HttpSession, Limits, http_parts
from megatron_dta.core.common.errors import InputError

MOST_REPLY_BYTES = 1 << 20
ATTEMPTS, FIRST_PAUSE_S, LONGEST_PAUSE_S = 4, 0.2, 10.0


class RemoteReward:
    """A reward function; see the module's docstring.

    Attributes:
        counts: ``reward_retries`` (attempts after the first), ``reward_timeouts``.
    """

    is_concurrent = True

    def __init__(self, urls: Sequence[str], timeout_s: float = 60.0, attempts: int = ATTEMPTS) -> None:
        self._servers = JsonServers("--reward-server-url", urls, timeout_s, attempts)
        self.counts = self._servers.counts

    def __call__(self, prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
        """The server's reward; ``InputError`` names the reason if there is none."""
        body = {"prompt": prompt, "response": response, "response_token_ids": response_token_ids}
        return _reward_in(*self._servers.ask(body))


class JsonServers:
    """Servers that take turns at answering requests of JSON.

    Args:
        flag: names the servers.
        most_bytes: maximum length of a reply.
    """

    def __init__(
        self,
        flag: str,
        urls: Sequence[str],
        timeout_s: float,
        attempts: int = ATTEMPTS,
        most_bytes: int = MOST_REPLY_BYTES,
    ) -> None:
        if not urls:
            raise InputError(f"{flag} http://HOST:PORT/PATH is missing")
        for url in urls:
            if http_parts(url) is None:
                raise InputError(f"{flag} {url}: must be like http://HOST:PORT/PATH")
        limits = Limits(timeout_s, min(10.0, timeout_s), attempts, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._http = HttpSession("reward servers", limits)
        self._urls, self._most_bytes, self._turns = urls, most_bytes, itertools.count()
        self.counts = {"reward_retries": 0, "reward_timeouts": 0}

    def ask(self, body: Mapping[str, Any]) -> tuple[bytes | bytearray, str]:
        """The reply, and the server's name for messages; ``InputError`` if there is none."""
        return self._http.start(self._ask(json.dumps(body))).result()

    async def _ask(self, body: str) -> tuple[bytes | bytearray, str]:
        turn, url = next(self._turns), ""

        async def attempt(number: int) -> bytes | bytearray:
            nonlocal url
            url = self._urls[(turn + number - 1) % len(self._urls)]
            try:
                return await self._http.send("POST", url, "", body, self._most_bytes)
            except TimedOutError:
                self._count("reward_timeouts")
                raise

        try:
            content = await self._http.retried(attempt, on_retry=lambda: self._count("reward_retries"))
        except TransientFailureError as error:
            attempts = self._http.limits.attempts
            raise InputError(f"reward server {url}: failed {attempts} times, the last time: {error}") from error
        except RefusedError as error:
            raise InputError(f"reward server {url}: {error}") from error
        return content, f"reward server {url}"

    def _count(self, name: str) -> None:
        self.counts[name] += 1


def _reward_in(content: bytes | bytearray, where: str) -> float:
    try:
        value = field_of(parse_json(content), "reward", kind=(int, float))
    except TransientFailureError as error:
        raise InputError(f'{where}: {error}; it must be like {{"reward": 0.5}}') from None
    except ValueError:
        raise InputError(f"{where}: the reply is not JSON: {message_in(content)}") from None
    reward = as_float(value)
    if not math.isfinite(reward):
        raise InputError(f"{where}: the reward must be finite, got {shown(value)}")
    return reward
