"""Makes and loads sets of trees: random ones with a given overlap of their sequences, and the rollout sets.

The overlap of a set is 1 - unique tokens / tokens of all sequences. A tree of the loss is a group of sequences: the
rollouts of one task. The forest that training builds also shares what groups have in common, such as a system prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.tree import PrefixTree, build_prefix_tree
from megatron_dta.extras.parity.cases import compact_vocabulary

# Every fourth block of a sixteenth of a random sequence is not trained, like what an environment adds.
BLOCKS = 4


@dataclass(frozen=True)
class TreeSet:
    """Sequences of several trees.

    Attributes:
        groups: for every sample, the number of its tree.
    """

    name: str
    samples: list[TrainingSample]
    groups: np.ndarray

    @cached_property
    def tree(self) -> PrefixTree:
        """The prefix forest of all sequences."""
        return build_prefix_tree([sample.token_ids for sample in self.samples])

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def longest(self) -> int:
        return max(len(sample.token_ids) for sample in self.samples)

    @property
    def overlap(self) -> float:
        return 1 - self.tree.num_tokens / self.tokens

    @property
    def vocab_size(self) -> int:
        """Smallest vocabulary that has all tokens."""
        return 1 + max(int(sample.token_ids.max()) for sample in self.samples)

    def first_tokens(self, limit: int) -> TreeSet | None:
        """The first sequences with up to ``limit`` tokens together; None if they are fewer than two."""
        count = int(np.searchsorted(np.cumsum([len(sample.token_ids) for sample in self.samples]), limit, side="right"))
        return None if count < 2 else TreeSet(self.name, self.samples[:count], self.groups[:count])

    def renumbered(self) -> TreeSet:
        """The same forest with tokens numbered from 0, for a small vocabulary."""
        token_ids, _ = compact_vocabulary([sample.token_ids for sample in self.samples])
        samples = [TrainingSample(ids, sample.loss_mask) for ids, sample in zip(token_ids, self.samples, strict=True)]
        return TreeSet(self.name, samples, self.groups)


def random_trees(
    overlap: float, sequences: int, length: int, vocab_size: int, trees: int = 1, seed: int = 0
) -> TreeSet:
    """``trees`` trees of ``sequences`` sequences of ``length`` random tokens each, with a given overlap.

    Every sequence leaves the one before it at a random depth, so trees fork everywhere. The depths are drawn as
    ``length * u ** a``, where ``a`` is chosen for the overlap; at most 1 - 1 / sequences is possible.
    """
    generator = np.random.default_rng((seed, 11))
    samples: list[TrainingSample] = []
    # The first block is the prompt.
    mask = (np.arange(length) // max(1, length // 16) % BLOCKS) != 0
    for _ in range(trees):
        depths = _fork_depths(generator.random(sequences - 1), overlap * sequences * length, length)
        token_ids = generator.integers(0, vocab_size, length, dtype=np.int32)
        samples.append(TrainingSample(token_ids, mask))
        for depth in depths.tolist():
            other = generator.integers(0, vocab_size, length, dtype=np.int32)
            if other[depth] == token_ids[depth]:
                other[depth] = (other[depth] + 1) % vocab_size
            token_ids = np.concatenate([token_ids[:depth], other[depth:]])
            samples.append(TrainingSample(token_ids, mask))
    return TreeSet(f"overlap {overlap:g}", samples, np.repeat(np.arange(trees), sequences))


def _fork_depths(uniform: np.ndarray, total: float, length: int) -> np.ndarray:
    """int64: depths below ``length`` whose sum is ``total``, up to rounding."""
    if total == 0:
        return np.zeros(len(uniform), np.int64)
    low, high = 0.0, 1e6
    for _ in range(100):
        exponent = (low + high) / 2
        if (length - 1) * (uniform**exponent).sum() > total:
            low = exponent
        else:
            high = exponent
    return np.round((length - 1) * uniform**low).astype(np.int64)


def load_set(path: Path) -> TreeSet:
    """The sequences of a rollout file that train a token; its groups are its trees."""
    rollouts = [rollout for rollout in load_rollouts(path) if rollout.loss_mask.any()]
    samples = [TrainingSample(rollout.token_ids, rollout.loss_mask) for rollout in rollouts]
    _, groups = np.unique([rollout.group_id for rollout in rollouts], return_inverse=True)
    return TreeSet(path.stem, samples, groups)
