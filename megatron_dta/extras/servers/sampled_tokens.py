"""The tokens of a response that servers have sampled so far, maybe on several versions of the weights.

Ids that the tokenizer lacks are rejected: the response is cut before the first one and sampled on from there with
another seed. What is sampled then has the distribution without these ids, on every kind of server.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.extras.servers.http_client import ServerError

_MOST_REJECTED = 50  # and four for every token of the response


@dataclass(frozen=True)
class SampledTokens:
    """Tokens [R] with their logprobs and the versions that sampled them, and the number of rejected tokens."""

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rejected: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def extended(
        self, token_ids: np.ndarray, logprobs: np.ndarray, version: int, vocab_size: int | None = None
    ) -> SampledTokens:
        """This response with more tokens, of one version, up to the first one from ``vocab_size`` on."""
        unknown = np.flatnonzero(token_ids >= vocab_size) if vocab_size is not None else ()
        count = int(unknown[0]) if len(unknown) else len(token_ids)
        return SampledTokens(
            np.concatenate([self.token_ids, token_ids[:count]]),
            np.concatenate([self.logprobs, logprobs[:count]]),
            np.concatenate([self.versions, np.full(count, version)]),
            self.rejected + (count < len(token_ids)),
        )

    def end(self, eos_ids: Collection[int], label: str) -> int | None:
        """The index of the end of sequence, which is the last token; None if there is none.

        Raises:
            ServerError: the server of the request ``label`` has sampled past it, or it samples hardly anything but
                ids that are rejected.
        """
        if self.rejected > _MOST_REJECTED + 4 * len(self):
            raise ServerError(
                f"{label}: the server sampled {self.rejected} ids that the tokenizer lacks beside {len(self)} others: "
                "it has another model, or its model was not trained with this tokenizer"
            )
        ends = np.flatnonzero(np.isin(self.token_ids, list(eos_ids)))
        if ends.size and ends[0] + 1 < len(self):
            raise ServerError(f"{label}: the server sampled past an end of sequence that it was given")
        return int(ends[0]) if ends.size else None
