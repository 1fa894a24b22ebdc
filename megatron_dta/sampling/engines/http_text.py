"""URLs of servers checked, and their errors on one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from megatron_dta.errors import InputError

_MESSAGE_LENGTH = 300


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


def told(error: BaseException) -> str:
    """What an error says, or what it is."""
    return _one_line(str(error)) or type(error).__name__


def message_in(content: bytes) -> str:
    """What the servers say in their different forms of error replies, on one line."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            while isinstance(found, dict) and key in found:
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        pass
    return _one_line(text) or "(nothing)"


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MESSAGE_LENGTH else text[:_MESSAGE_LENGTH] + "..."
