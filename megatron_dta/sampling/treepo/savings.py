"""Summarizes in one sentence how many tokens tree sampling saved, from the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def treepo_benefit(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Decoded tokens relative to trained tokens, as a sentence; None if no rollouts were sampled as trees."""
    steps = [record for record in records if "effective_leaves" in record]
    decoded = sum(record["decoded_tokens"] for record in steps)
    trained = sum(record["rollouts"] * record["response_tokens"] for record in steps)
    # Independent rollouts with an environment are trees that share no nodes.
    if round(decoded) == round(trained):
        return None
    sentence = f"TreePO decoded {decoded / trained:.2f} of the trained tokens ({decoded:,.0f} of {trained:,.0f}"
    # Every step of a rollout batch repeats this statistic.
    left_out = sum(step.get("left_out_decoded_tokens", 0) for step in steps if not step.get("rollout_batch_step"))
    if left_out:
        sentence += f", and {left_out:,.0f} for prompts that were left out"
    leaves = sum(record["effective_leaves"] for record in steps) / len(steps)
    return f"{sentence}); a tree's leaves were worth {leaves:.1f} independent rollouts for a mean."
