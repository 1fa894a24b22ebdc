"""A reward that a model earns before it solves a problem, for runs too short to learn that."""

from __future__ import annotations

from typing import Any


def right_share(prompt: dict[str, Any], response: str, response_token_ids: list[int]) -> float:
    """The share of characters that are right."""
    right = sum(a == b for a, b in zip(response, prompt["answer"], strict=False))
    return right / max(len(response), len(prompt["answer"]))
