"""Hides credentials in text that is printed or stored: settings, checkpoints, error messages and progress lines."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_SECRET = r"(?:api[-_]?key|(?:access|auth|bearer)[-_]?token|secret(?:[-_]?key)?|passw(?:or)?d)"
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # http://USER:PASSWORD@HOST. What follows a colon and is no port is a password, even with unquoted slashes.
        r"(?P<before>[a-z][a-z0-9+.-]*://)(?:[^\s/]*|[^\s/:]*:(?!\d+(?:[/\s]|$))\S*)(?P<after>@)",
        # ?token=... in the query of a URL.
        r"(?P<before>[?&][^\s=&]*(?:key|token|secret|sig|signature|passw(?:or)?d)=)[^\s&#'\"]+(?P<after>)",
        # OPENAI_API_KEY=... and --api-key ... in the command of an agent.
        rf"(?P<before>\b[\w-]*{_SECRET}=|--[\w-]*{_SECRET}\s+)(?:'[^']*'|\"[^\"]*\"|[^\s'\"&]+)(?P<after>)",
    )
)


def redacted(text: str) -> str:
    """``text`` with ``***`` in the place of logins in URLs and of values whose names say that they are secret."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<before>{HIDDEN}\g<after>", text)
    return text


def redacted_values(value: Any) -> Any:
    """``value`` with all its strings redacted, also those in lists."""
    if isinstance(value, list):
        return [redacted_values(part) for part in value]
    return redacted(value) if isinstance(value, str) else value
