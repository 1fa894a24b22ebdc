"""An HTTP client whose requests take bounded time and memory, for servers that may be broken or malicious.

The library is aiohttp, because many hundreds of long requests are open at once. Its event loop runs in a thread, so
callers need not be asynchronous.

A request goes to the given address and nowhere else: there are no redirects, proxies or cookies, so nobody but the
server sees the key. Replies are not decompressed, are read up to a given length, and end in time as a whole.

    failure                                            raises
    connection, 408, 429, 5xx, a reply that is cut,    ``TransientFailureError``: another attempt may succeed
    too long or of the wrong form
    no reply in time                                   ``TimedOutError``, which is one
    another status                                     ``RefusedError``: the request is wrong
"""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from megatron_dta.common.http.replies import (
    MOST_ERROR_BYTES,
    MOST_REPLY_BYTES,
    RefusedError,
    TimedOutError,
    TransientFailureError,
    format_error,
    message_in,
    read_at_most,
)
from megatron_dta.core.common.errors import InputError

_TRANSIENT = frozenset((408, 429))
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Limits:
    """Time and attempts of requests.

    Attributes:
        timeout_s: for one attempt, up to the end of the reply.
        connect_timeout_s: for opening a connection.
        attempts: maximum number of times that a request is sent.
        backoff_s, backoff_limit_s: first and longest pause between attempts; pauses double, and half of each is random.
    """

    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    attempts: int = 6
    backoff_s: float = 0.5
    backoff_limit_s: float = 30.0


class HttpSession:
    """Sends requests from a thread.

    Args:
        user: what needs the client, for the line that says that aiohttp is missing.
        key_variable: environment variable with a key that is sent as a bearer token; None: no key.

    Raises:
        InputError: the package aiohttp is missing, or the key cannot be sent.
    """

    def __init__(self, user: str, limits: Limits, key_variable: str | None = None) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise InputError(
                f"{user} need the package aiohttp; install it, or megatron_dta with its extra servers"
            ) from error
        self._aiohttp, self.limits = aiohttp, limits
        headers = {"Accept-Encoding": "identity"} | _authorization(key_variable)
        # The state of the global generator belongs to checkpoints.
        self._random = random.Random()
        self._loop, self._closed = asyncio.new_event_loop(), False
        self._thread = threading.Thread(target=self._loop.run_forever, name=user, daemon=True)
        self._thread.start()
        self._session = self.start(self._open(headers)).result()
        # Programs that end without closing it should not print warnings.
        atexit.register(self.close)

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Run a coroutine on the session's loop; may be called from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Close all connections and cancel open requests. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.start(self._cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def send(
        self,
        method: str,
        url: str,
        path: str,
        body: Mapping[str, Any] | str | bytes | None = None,
        most_bytes: int = MOST_REPLY_BYTES,
        timeout_s: float | None = None,
    ) -> bytes | bytearray:
        """Send one request once; returns the body of its reply, which has the status 200.

        Args:
            body: an object to be sent as JSON, the text of one, or bytes of another form.
        """
        request = f"{method} {path}".rstrip()
        timeout_s = self.limits.timeout_s if timeout_s is None else timeout_s
        content: dict[str, Any] = {"json" if isinstance(body, Mapping) else "data": body}
        if isinstance(body, str):
            content["headers"] = {"Content-Type": "application/json"}
        try:
            # The library's own timeout does not cover everything that it waits for.
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url + path, allow_redirects=False, **content) as reply,
            ):
                status = reply.status
                reply_body = await _content(reply, most_bytes)
        except TransientFailureError as error:
            raise TransientFailureError(f"{request}: {error}") from error
        except TimeoutError as error:
            if str(error):  # the connection was not established
                raise TransientFailureError(f"{request}: {format_error(error)}") from error
            raise TimedOutError(f"{request}: no reply within {timeout_s:g} s") from error
        # ValueError: what aiohttp raises for some malformed replies.
        except (self._aiohttp.ClientError, OSError, ValueError) as error:
            raise TransientFailureError(f"{request}: {format_error(error)}") from error
        if status >= 500 or status in _TRANSIENT:
            raise TransientFailureError(f"{request} gives {status}: {message_in(reply_body)}")
        if status != 200:
            redirected = "redirects are not followed, give the address itself" if 300 <= status < 400 else None
            raise RefusedError(f"{request} is refused with {status}: {redirected or message_in(reply_body)}")
        return reply_body

    async def retried(
        self,
        attempt: Callable[[int], Awaitable[Answer]],
        attempts: int | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> Answer:
        """The result of ``attempt``, which gets its number and is repeated after a pause.

        Raises:
            TransientFailureError: the last attempt has failed.
        """
        last = attempts or self.limits.attempts
        for number in range(1, last):
            try:
                return await attempt(number)
            except TransientFailureError:
                on_retry()
                await self.pause(number)
        return await attempt(last)

    async def pause(self, attempt: int) -> None:
        """Wait after attempt number ``attempt``, counted from 1."""
        longest = min(self.limits.backoff_s * 2 ** (attempt - 1), self.limits.backoff_limit_s)
        await asyncio.sleep(longest * (0.5 + 0.5 * self._random.random()))

    async def _open(self, headers: dict[str, str]) -> Any:
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_timeout_s)
        return self._aiohttp.ClientSession(
            # The callers limit the open connections.
            connector=self._aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            # A few bytes may decompress to any number of bytes.
            auto_decompress=False,
            cookie_jar=self._aiohttp.DummyCookieJar(),
            headers=headers,
        )

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()


def http_parts(url: str) -> SplitResult | None:
    """The parts of the URL of a server; None if it is none."""
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


async def _content(reply: Any, most_bytes: int) -> bytes | bytearray:
    """The body of a reply, or the beginning of the body of an error."""
    parts = reply.content.iter_any()
    if reply.status != 200:
        return await read_at_most(parts, MOST_ERROR_BYTES, cut=True)
    if reply.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise TransientFailureError("the reply is compressed, which was not asked for")
    return await read_at_most(parts, most_bytes)


def _authorization(key_variable: str | None) -> dict[str, str]:
    key = os.environ.get(key_variable or "", "")
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{key_variable}: the key must be printable ASCII, without line breaks")
    return {"Authorization": f"Bearer {key}"} if key else {}
