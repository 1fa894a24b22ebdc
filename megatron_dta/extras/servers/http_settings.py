"""Settings of the HTTP client: timeouts, retries, and checked URLs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dta.common.http.session import Limits, http_parts
from megatron_dta.core.common.errors import InputError


@dataclass(frozen=True)
class HttpSettings(Limits):
    """Timeouts and limits of requests; ``attempts`` are over all servers, and a health check takes at most
    ``connect_timeout_s``.

    Attributes:
        continues: running requests continue on new weights; see ``engine``.
        max_requests: maximum number of open requests per server.
        slower_by: factor by which a server must be slower than another one for its requests to be moved; see
            ``late_requests``.
        move_s: pause between looking for such requests.
        processes: number of processes that send requests; 0 for a thread. See ``senders``.
        revisit_s: pause between visits to servers that are left out, and between readings of the list of servers.
    """

    max_requests: int = 256
    continues: bool = False
    slower_by: float = 2.0
    move_s: float = 5.0
    processes: int = 0
    revisit_s: float = 15.0


def listed_urls(path: Path) -> list[str]:
    """The URLs in a file, one a line; empty lines and comments (#) are skipped.

    Raises:
        InputError: the file cannot be read, lists no server, or a bad URL.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--rollout-server-file {path}: cannot be read ({reason})") from error
    stripped = (line.partition("#")[0].strip() for line in lines)
    found = [url for url in stripped if url]
    if not found:
        raise InputError(f"--rollout-server-file {path}: lists no server; write one URL a line")
    return checked_urls(found, f"--rollout-server-file {path}:")


def checked_urls(urls: Sequence[str], source: str = "--rollout-server-url") -> list[str]:
    """URLs without trailing slashes; ``InputError``, which begins with ``source``, for none or a bad one."""
    checked = [url.rstrip("/") for url in urls]
    if not checked:
        raise InputError(f"{source}: give at least one")
    for url in checked:
        parts = http_parts(url)
        if parts is None or parts.query:
            raise InputError(f"{source} {url}: must be like http://HOST:PORT")
        if checked.count(url) > 1:
            raise InputError(f"{source} {url}: is given twice")
    return checked
