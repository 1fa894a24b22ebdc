"""Random forests with loss masks, and their costs by sets of prefixes, for the tests of partitions."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from megatron_dta.core.planning.costs.model import CostModel

# Whole numbers, and segments that cost nothing: costs are exact and ties are ties.
WHOLE_COSTS = CostModel(5, 1, 3, 0, 1)


def random_forest(
    rng: np.random.Generator, count: int, longest: int = 12, one_root: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sequences that share prefixes, with duplicates and prefixes of others, and a random loss mask for each."""
    sequences: list[np.ndarray] = []
    for _ in range(count):
        prefix = np.zeros(1 if one_root else 0, dtype=np.int64)
        if sequences and rng.random() < 0.7:
            prefix = sequences[rng.integers(len(sequences))]
            prefix = prefix[: rng.integers(1, len(prefix) + 1)]
        more = rng.integers(0, 3, rng.integers(0 if len(prefix) > 1 else 1, longest + 1))
        sequences.append(np.concatenate([prefix, more]).astype(np.int32))
    masks = []
    for sequence in sequences:
        mask = rng.random(len(sequence)) < rng.choice([0.1, 0.5, 1.0])
        mask[0] = False
        masks.append(mask)
    return sequences, masks


def turns_forest(rng: np.random.Generator, groups: int, trials: int, turns: int) -> tuple[list, list, list[str]]:
    """Agent trajectories, one sample a turn: tokens, masks of the last turn, group names."""
    system = rng.integers(0, 99, 40)
    sequences, masks, names = [], [], []
    for group in range(groups):
        task = np.concatenate([system, rng.integers(0, 99, int(rng.integers(10, 40)))])
        for _ in range(trials):
            tokens = task
            for _ in range(int(rng.integers(1, turns + 1))):
                new = int(rng.integers(2, 60))
                tokens = np.concatenate([tokens, rng.integers(0, 99, new)])
                mask = np.zeros(len(tokens), bool)
                mask[-(new // 2 + 1) :] = True
                sequences.append(tokens.astype(np.int32))
                masks.append(mask)
                names.append(f"task {group}")
    return sequences, masks, names


def counts(sequences: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> tuple[int, int, int]:
    """Unique tokens, visible pairs and unique trained edges by sets of prefixes."""
    prefixes, edges = set(), set()
    for sequence, mask in zip(sequences, masks, strict=True):
        tokens = tuple(sequence.tolist())
        for end in range(1, len(tokens) + 1):
            prefixes.add(tokens[:end])
            if mask[end - 1]:
                edges.add(tokens[:end])
    return len(prefixes), sum(map(len, prefixes)), len(edges)


def cost(model: CostModel, sequences: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> float:
    """Cost of one rank that holds these sequences, in exact arithmetic."""
    tokens, pairs, edges = counts(sequences, masks)
    per_token = max(Fraction(model.seconds_per_token), Fraction(model.floor_seconds) / model.segment_tokens)
    return float(
        per_token * tokens + Fraction(model.seconds_per_pair) * pairs + Fraction(model.seconds_per_edge) * edges
    )


def assignments(count: int, ranks: int) -> Iterator[list[int]]:
    """Every way to divide ``count`` items over ``ranks`` alike ranks."""

    def extend(head: list[int]) -> Iterator[list[int]]:
        if len(head) == count:
            yield head
            return
        for rank in range(min(max(head, default=-1) + 2, ranks)):
            yield from extend([*head, rank])

    yield from extend([])
