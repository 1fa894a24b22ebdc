"""Which servers a client talks to, and how patient it is with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from megatron_dta.common.errors import InputError


@dataclass(frozen=True)
class HttpSettings:
    """How patient to be.

    Attributes:
        timeout_s: for one generation request or one step of a weight update, from sending to the whole reply.
        connect_timeout_s: for opening a connection, and for a health check.
        attempts: how often one request is sent at most, all servers together.
        backoff_s, backoff_limit_s: first and longest pause between attempts; it doubles, and half of it is random.
        max_requests: open requests for each server.
    """

    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    attempts: int = 6
    backoff_s: float = 0.5
    backoff_limit_s: float = 30.0
    max_requests: int = 256


def checked_urls(urls: Sequence[str]) -> list[str]:
    """``--rollout-server-url`` without slashes at the end; ``InputError`` for none, a wrong one, or one given twice."""
    checked = [url.rstrip("/") for url in urls]
    if not checked:
        raise InputError("--rollout-server-url: give at least one")
    for url in checked:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise InputError(f"--rollout-server-url {url}: must be like http://HOST:PORT")
        if checked.count(url) > 1:
            raise InputError(f"--rollout-server-url {url}: is given twice")
    return checked
