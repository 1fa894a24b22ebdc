"""The tokens of a response that servers have sampled so far, maybe on several versions of the weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class SampledTokens:
    """Tokens [R] with their logprobs and the versions that sampled them."""

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.token_ids)

    def extended(self, token_ids: np.ndarray, logprobs: np.ndarray, version: int) -> SampledTokens:
        """This response with more tokens, of one version."""
        return SampledTokens(
            np.concatenate([self.token_ids, token_ids]),
            np.concatenate([self.logprobs, logprobs]),
            np.concatenate([self.versions, np.full(len(token_ids), version)]),
        )

    def first_end(self, eos_ids: Collection[int]) -> int | None:
        """The place of the first end of sequence."""
        ends = np.flatnonzero(np.isin(self.token_ids, list(eos_ids)))
        return int(ends[0]) if ends.size else None
