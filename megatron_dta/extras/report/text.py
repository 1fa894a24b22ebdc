"""How the page writes numbers and texts."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Format a number for people."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def visible(value: object) -> object:
    """Return a text with unprintable characters, which could change how its surroundings are shown, as escapes."""
    # Markup, a subclass of str, is from the page's template.
    if type(value) is not str or value.isprintable():
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in value)
