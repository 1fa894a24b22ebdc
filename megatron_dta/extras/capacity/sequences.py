"""Generates sequences with given totals, to plan a run whose rollouts do not exist yet.

All prompts have one length, and the answers of each prompt have nearly equal lengths. One answer is longer, so that the
longest sequence has the requested length.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.core.common.errors import InputError


def made_up_sequences(
    num_sequences: int,
    unique_tokens: int,
    longest_path: int,
    samples_per_prompt: int = 1,
    attention_pairs: int | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Generate token ids and loss masks of sequences with these totals; the answers are trained.

    Args:
        num_sequences: sequences of the step.
        unique_tokens: tokens of the forest, with shared tokens counted once.
        longest_path: tokens of the longest sequence.
        samples_per_prompt: sequences that share a prompt.
        attention_pairs: (query, key) pairs; selects the length of the prompts whose forest comes nearest. None takes
            the longest possible prompts, which have most pairs.

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
    prompt = most
    if attention_pairs is not None:
        prompt = _prompt_for_pairs(num_sequences, groups, unique_tokens, longest_path, attention_pairs, most)
    sequences, masks = [], []
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


def _prompt_for_pairs(
    num_sequences: int, groups: int, unique: int, longest: int, attention_pairs: int, most: int
) -> int:
    """Length of the prompts whose forest comes nearest to ``attention_pairs``."""

    def pairs(prompt: int) -> float:
        answers = _answers(num_sequences, groups, unique, prompt, longest)
        if answers is None:
            return np.nan
        lengths = np.asarray(answers, dtype=np.float64)
        return groups * prompt * (prompt + 1) / 2 + float((lengths * prompt + lengths * (lengths + 1) / 2).sum())

    prompts = np.unique(np.linspace(1, most, 1024).astype(int)).tolist()
    counts = np.asarray([pairs(prompt) for prompt in prompts])
    nearest = int(np.nanargmin(np.abs(counts - attention_pairs)))
    if abs(counts[nearest] - attention_pairs) > 0.05 * attention_pairs:
        raise InputError(
            f"--attention-pairs {attention_pairs} is not possible: {num_sequences} sequences of {unique} unique tokens "
            f"and a longest path of {longest} have {np.nanmin(counts):,.0f} to {np.nanmax(counts):,.0f}"
        )
    return prompts[nearest]
