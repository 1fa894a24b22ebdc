"""Summarizes in one sentence each what the methods of a run saved, for the end of training and the report.

The sentences are derived from the records of the metrics file, so the report of a continued run covers all of its
steps. They state counted or measured values, even if a method did not pay off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dta.sampling.speculation.report import drafting_benefit

Records = Sequence[Mapping[str, Any]]


def benefit_sentences(records: Records) -> list[str]:
    """The sentences of all methods that the run used."""
    sentences = (tree_benefit(records), treepo_benefit(records), drafting_benefit(records))
    return [sentence for sentence in sentences if sentence is not None]


def tree_benefit(records: Records) -> str | None:
    """The token reuse of a run and the operations that training without sharing would have taken.

    Returns:
        the sentence, or None if no step shared a token.
    """
    steps = [record for record in records if "unique_tokens" in record]
    tokens, unique = (sum(record[name] for record in steps) for name in ("tokens", "unique_tokens"))
    if tokens == unique:
        return None
    sentence = f"Trees: {tokens / unique:.2f}x token reuse"
    counted = [record for record in steps if record.get("tree_tflop")]
    tree, dense = (sum(record[name] for record in counted) for name in ("tree_tflop", "dense_tflop"))
    if tree:
        sentence += (
            f"; without sharing, forward and backward would have taken {dense / tree:.2f} times the operations "
            f"({_operations(dense)} instead of {_operations(tree)})"
        )
    return sentence


def treepo_benefit(records: Records) -> str | None:
    """Decoded tokens relative to trained tokens, as a sentence; None if no rollouts were sampled as trees."""
    steps = [record for record in records if "effective_leaves" in record]
    decoded = sum(record["decoded_tokens"] for record in steps)
    trained = sum(record["rollouts"] * record["response_tokens"] for record in steps)
    # Independent rollouts with an environment are trees that share no nodes.
    if round(decoded) == round(trained):
        return None
    sentence = f"TreePO decoded {decoded / trained:.2f} of the trained tokens"
    # Every step of a rollout batch repeats this statistic.
    left_out = sum(step.get("left_out_decoded_tokens", 0) for step in steps if not step.get("rollout_batch_step"))
    if left_out:
        sentence += f", and {left_out:,.0f} tokens for prompts that were left out"
    leaves = sum(record["effective_leaves"] for record in steps) / len(steps)
    return f"{sentence}; a tree's leaves were worth {leaves:.1f} independent rollouts for a mean."


def _operations(tflop: float) -> str:
    """Format floating-point operations with three digits and a unit."""
    for factor, unit in ((1e6, "EFLOP"), (1e3, "PFLOP"), (1.0, "TFLOP"), (1e-3, "GFLOP")):
        if tflop >= factor:
            return f"{tflop / factor:.3g} {unit}"
    return f"{tflop * 1e6:.3g} MFLOP"
