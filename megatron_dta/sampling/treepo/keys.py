"""Random numbers of a tree: a key for each node's tokens, and a generator for each decision of its query.

Both are functions of names alone. The key of a node is one of (query, child numbers from the root down), so its tokens
do not depend on when it was started or what else runs, and two nodes never share noise. A decision (how many branches
at the root, who gets the remainder of a budget, where to fall back) draws from a generator of its own, keyed by
(seed, domain, iteration, query, kind of decision, its number).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megatron_dta.sampling.params import SamplingParams


class Decision(IntEnum):
    """What a generator is for."""

    INITIAL_BRANCHES = 0
    REMAINDER = 1
    FALLBACK = 2


def node_key(query: int, path: tuple[int, ...]) -> int:
    """Key in [0, 2^63) of the node that ``path`` (child numbers from the root) leads to."""
    return _digest((query, *path)) >> 1


@dataclass(frozen=True)
class QueryNumbers:
    """The generators of one query in one iteration."""

    params: SamplingParams
    iteration: int
    query: int

    def generator(self, decision: Decision, number: int = 0) -> np.random.Generator:
        """A fresh generator, the same for the same arguments."""
        name = (self.params.seed, int(self.params.domain), self.iteration, self.query, int(decision), number)
        return np.random.Generator(np.random.Philox(key=_digest(name)))


def _digest(name: tuple[int, ...]) -> int:
    """64 bits of a hash of the numbers; with their count, so that no name is the beginning of another."""
    text = f"{len(name)}:" + ",".join(map(str, name))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
