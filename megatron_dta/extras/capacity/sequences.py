"""Generates sequences with given totals, to plan a run whose rollouts do not exist yet.

All prompts have one length, the longest possible, and the answers of each prompt have nearly equal lengths. One answer
is longer, so that the longest sequence has the requested length.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.core.common.errors import InputError


def made_up_sequences(
    num_sequences: int, unique_tokens: int, longest_path: int, samples_per_prompt: int = 1
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Generate token ids and loss masks of sequences with these totals; the answers are trained.

    Args:
        num_sequences: sequences of the step.
        unique_tokens: tokens of the forest, with shared tokens counted once.
        longest_path: tokens of the longest sequence.
        samples_per_prompt: sequences that share a prompt.

    Raises:
        InputError: no forest has these totals.
    """
    for flag, value in (("--sequences", num_sequences), ("--samples-per-prompt", samples_per_prompt)):
        if value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")
    groups = -(-num_sequences // samples_per_prompt)
    most = longest_path - 1
    if num_sequences > groups:  # No sequence exceeds the longest path.
        most = min(most, (num_sequences * longest_path - unique_tokens) // (num_sequences - groups))
    if groups > 1:  # Every answer has at least one token.
        most = min(most, (unique_tokens - longest_path - num_sequences + 1) // (groups - 1))
    if most < 1 or _answers(num_sequences, groups, unique_tokens, most, longest_path) is None:
        raise InputError(
            f"--unique-tokens {unique_tokens} and --longest-path {longest_path} do not fit {num_sequences} sequences, "
            f"{samples_per_prompt} of each prompt: with one sequence both are equal, and with more there are at least "
            "a token of each prompt and answer and at most the longest path for each sequence"
        )
    sequences, masks, prompt = [], [], most
    for i, answer in enumerate(_answers(num_sequences, groups, unique_tokens, prompt, longest_path)):
        tokens = np.zeros(prompt + answer, dtype=np.int32)
        tokens[0], tokens[prompt] = 1 + i // samples_per_prompt, 1 + i
        mask = np.zeros(len(tokens), dtype=bool)
        mask[prompt:] = True
        sequences.append(tokens)
        masks.append(mask)
    return sequences, masks


def _answers(num_sequences: int, groups: int, unique: int, prompt: int, longest: int) -> list[int] | None:
    """Lengths of the answers, longest first; None if the totals do not fit."""
    first = longest - prompt
    rest = unique - groups * prompt - first
    if num_sequences == 1:
        return [first] if rest == 0 else None
    if first < 1 or rest < num_sequences - 1 or -(-rest // (num_sequences - 1)) > first:
        return None
    length, more = divmod(rest, num_sequences - 1)
    return [first] + [length + (i < more) for i in range(num_sequences - 1)]
