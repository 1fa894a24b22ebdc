"""Cases and helpers that tests of pipeline layers share."""

from __future__ import annotations


def divisions(layers: int, stages: int, least: int) -> list[list[int]]:
    if stages == 1:
        return [[layers]] if layers >= least else []
    return [
        [first, *rest] for first in range(least, layers + 1) for rest in divisions(layers - first, stages - 1, least)
    ]
