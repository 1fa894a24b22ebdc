"""Builds HTML and SVG with all text and attributes escaped, and computes axis ticks.

Charts are plain SVG, which needs no script, has tooltips, can be tested element by element, and is smaller than an
embedded plotting library.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
# Void elements have no closing tag.
VOID = ("input", "meta")
# Maximum width in pixels of a character of a tick label, which has a font size of 11 pixels.
TICK_CHARACTER = 7.0


class Markup(str):
    """Text that is already escaped."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element. Children other than ``Markup`` are escaped, lists are flattened, and None is omitted.

    In attribute names ``class_`` becomes ``class`` and underscores become dashes; attributes that are None are omitted.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in VOID else f"</{name}>"
    return Markup(f"<{name}{written}>{join(children)}{end}")


def join(children: Iterable[object]) -> Markup:
    """Concatenate the children as ``tag`` does."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, (list, tuple)):
            parts.append(join(child))
        else:
            parts.append(html.escape(visible(str(child)), quote=False))
    return Markup("".join(parts))


def svg(width: float, height: float, *children: object, title: str, **attributes: object) -> Markup:
    """Return an SVG picture of this size that shrinks with the page; ``title`` describes it to screen readers."""
    # The inner picture's own title element would be a tooltip over everything.
    return tag(
        "svg",
        *children,
        xmlns=SVG_NAMESPACE,
        viewBox=f"0 0 {_plain(width)} {_plain(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
        **attributes,
    )


def visible(text: str) -> str:
    """Return ``text`` with unprintable characters as escapes."""
    return "\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _plain(value: object) -> str:
    """Format a value; floats get at most two decimals, a hundredth of a pixel."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return visible(str(value))


def points(pairs: Iterable[tuple[float, float]]) -> str:
    """Return the ``d`` attribute of a path through these points."""
    return "M" + "L".join(f"{_plain(float(x))},{_plain(float(y))}" for x, y in pairs)


def number(value: float) -> str:
    """Format a number for people."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return tick labels with enough digits to differ from each other."""
    labels = [number(value) for value in ticks]
    digits = 4
    while len(set(labels)) < len(labels) and digits < 12:
        digits += 1
        labels = [f"{value:.{digits}g}" for value in ticks]
    return labels


def tick_below(label: str, x: float, y: float, width: float) -> Markup:
    """Return a tick label centred on ``x``, moved if it would leave the picture."""
    room = len(label) * TICK_CHARACTER / 2
    if x + room > width:
        return tag("text", label, x=width, y=y, class_="tick right")
    return tag("text", label, x=max(x, room), y=y, class_="tick middle")


def legend_key(color: str, text: str) -> Markup:
    """Return an entry of a legend."""
    return tag("span", tag("i", style=f"background:{color}"), text, class_="key")


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers within [low, high]."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / count))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= count:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most 6 powers of ten within [low, high]."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / 6))
    return [10.0**power for power in range(first, last + 1, stride)]


def padded(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds of an axis that contains all values; never equal."""
    low, high = min(values), max(values)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    room = 0.04 * (high - low)
    return low - room, high + room
