"""Keys the random numbers of a tree: one key per node for its tokens, and one generator per decision of its query.

The key of a node is a hash of (query, child numbers from the root down), so its tokens do not depend on when it was
started or on other requests. Each decision (the number of branches at the root, the paths that get the remainder of a
budget, the nodes of a fallback) draws from its own generator, keyed by (seed, domain, iteration, query, kind of
decision, number of the decision).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megatron_dta.sampling.params import SamplingParams


class Decision(IntEnum):
    """The kinds of decisions that need random numbers."""

    INITIAL_BRANCHES = 0
    REMAINDER = 1
    FALLBACK = 2


def node_key(query: int, path: tuple[int, ...]) -> int:
    """Key in [0, 2^63) of the node at ``path`` (child numbers from the root)."""
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
    """64-bit hash of the numbers and their count, so that no name is a prefix of another."""
    text = f"{len(name)}:" + ",".join(map(str, name))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
