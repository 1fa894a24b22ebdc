"""Asks a server for the reward of a response (``--reward-function remote``).

    POST URL   {"prompt": the prompt's record, "response": text, "response_token_ids": [ids]}
    answer     200 {"reward": 0.5}

After a failed connection, a late or truncated reply, or the statuses 408, 429 and 5xx, the request is sent again to the
next server after a growing pause. Any other status, and a reply of another form, is an error at once. Proxies,
redirects and compressed replies are not supported. Failed attempts are counted (``reward_retries``,
``reward_timeouts``).
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult

from megatron_dta.common.errors import InputError
from megatron_dta.sampling.engines.servers.http_settings import http_parts
from megatron_dta.sampling.engines.servers.replies import (
    TransientFailureError,
    as_float,
    field_of,
    format_error,
    message_in,
    parse_json,
    shown,
)

MOST_REPLY_BYTES = 1 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
_TRANSIENT = (408, 429)


class RemoteReward:
    """A reward function; see the module's docstring.

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
        """The server's reward; ``InputError`` names the reason if there is none."""
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
            except TransientFailureError as error:
                reason = str(error)
            except (OSError, http.client.HTTPException) as error:
                reason = format_error(error)
        raise InputError(f"reward server {url.geturl()}: failed {self._attempts} times, the last time: {reason}")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _post(self, url: SplitResult, body: bytes) -> bytes:
        """One attempt, within the timeout in total."""
        deadline = time.monotonic() + self._timeout_s
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname, url.port, timeout=self._timeout_s)
        try:
            connection.connect()
            # The socket's timeout applies to each read; this timer ends replies that arrive slowly, headers included.
            limit = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [connection.sock])
            limit.daemon = True
            limit.start()
            try:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
                connection.request("POST", path, body, headers)
                content = _read_reply(connection.getresponse(), f"reward server {url.geturl()}")
            except (OSError, ValueError, http.client.HTTPException, TransientFailureError) as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError from error
                raise
            finally:
                limit.cancel()
            # To the reader, a connection that was shut down looks like the end of the headers or the body.
            if time.monotonic() >= deadline:
                raise TimeoutError
            return content
        finally:
            connection.close()


def _shut_down(connection: socket.socket) -> None:
    """Shut down the socket, which ends a pending read or write."""
    with suppress(OSError):
        # The shutdown method of a TLS socket would remove the TLS layer under the reader.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _read_reply(reply: http.client.HTTPResponse, where: str) -> bytes:
    """The body of an answer with status 200; ``InputError`` if the server refuses."""
    content = bytearray()
    while part := reply.read1(1 << 16):
        content += part
        if len(content) > MOST_REPLY_BYTES:
            raise InputError(f"{where}: the reply is longer than {MOST_REPLY_BYTES} bytes")
    if reply.status >= 500 or reply.status in _TRANSIENT:
        raise TransientFailureError(f"status {reply.status}: {message_in(bytes(content))}")
    if reply.status != 200:
        raise InputError(f"{where}: refuses with {reply.status}: {message_in(bytes(content))}")
    length = reply.getheader("Content-Length")
    if length is not None and length.isdecimal() and int(length[:20]) != len(content):
        raise TransientFailureError(f"the reply is cut after {len(content)} of {length[:20]} bytes")
    if reply.getheader("Content-Encoding", "identity").lower() != "identity":
        raise InputError(f"{where}: the reply is compressed, which was not asked for")
    return bytes(content)


def _checked(url: str) -> SplitResult:
    parts = http_parts(url)
    if parts is None:
        raise InputError(f"--reward-server-url {url}: must be like http://HOST:PORT/PATH")
    return parts


def _reward_in(content: bytes, url: SplitResult) -> float:
    where = f"reward server {url.geturl()}"
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
