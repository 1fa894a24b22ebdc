"""Measures by parts what a process does until its first step: ``mark("imports")`` ends the part "imports"."""

from __future__ import annotations

import time

import psutil

_marks: list[tuple[str, float]] = []


def mark(part: str) -> None:
    """End the part of the start that has this name; the next one begins."""
    _marks.append((part, time.monotonic()))


def start_seconds() -> dict[str, float]:
    """Seconds by part, in the order of the marks."""
    # Both are seconds of the wall clock; their difference, like the monotonic clock, counts from the machine's start.
    began = psutil.Process().create_time() - psutil.boot_time()
    begins = [began, *(end for _, end in _marks)]
    return {part: end - begin for (part, end), begin in zip(_marks, begins, strict=False)}
