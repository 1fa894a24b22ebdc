"""The interface through which the in-process engine gets drafts to verify.

A draft is a guess at a request's next tokens. The engine runs the draft after the request's last token in the same
pass and samples at every position with the noise keyed by the position, exactly as it would without the draft. It keeps
the sampled tokens up to and including the first one that differs from the draft. Drafts therefore change the number of
passes and never the tokens, provided that a draft does not depend on the noise of the tokens it guesses. ``Drafting``
only sees tokens that have been sampled.

A rejected draft has no effect. A request's K and V are valid up to ``num_computed_tokens``; later positions in its
pages are overwritten before they are read. Pages are registered for sharing only once they are computed, and pages
reserved for the rejected part are returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.scheduler import Pass, Scheduler
from megatron_dta.sampling.params import SamplingParams

NO_DRAFT = np.zeros(0, np.int32)
_NO_GUESS = np.full(1, -1, np.int32)
LEAST_TOKENS = 128
"""Tokens of the smallest captured pass with drafts."""
FREE_TOKENS = 256
"""Tokens of a pass up to which more of them cost less than another round, which takes the host longer than the GPU."""


@dataclass(frozen=True)
class Round:
    """A pass with drafts, or a burst of passes without drafts, that has run.

    Attributes:
        rows: the requests that got tokens.
        drafted: int64 [n], tokens of each row's draft; None for a burst, in which row i got one token in each of the
            first ``len(appended[i])`` passes.
        appended: the new tokens of each row, int32.
        seconds: seconds of the round.
        num_tokens: tokens in each pass.
        captured: whether a graph was captured for it, which happens once.
    """

    rows: Sequence[Request]
    drafted: np.ndarray | None
    appended: Sequence[np.ndarray]
    seconds: float
    num_tokens: int
    captured: bool = False

    @property
    def decoding_passes(self) -> int:
        """The number of passes; 0 if they also computed prompts."""
        drafted = 0 if self.drafted is None else int(self.drafted.sum())
        if self.num_tokens > len(self.rows) + drafted:
            return 0
        return max(map(len, self.appended)) if self.drafted is None else 1


class Drafting:
    """Proposes drafts. All ranks of a replica must propose the same ones."""

    def started(self, params: SamplingParams) -> None:
        """A phase begins: requests until ``ended`` use these parameters and the present weights."""

    def ended(self) -> None:
        """The phase has ended; all its requests are complete."""

    def submitted(self, requests: Iterable[Request]) -> None:
        """Requests were submitted."""

    def wants(self, live: int) -> bool:
        """Whether to ask for drafts in this round, a pass or burst in which ``live`` rows get tokens."""
        return self.asks_next

    @property
    def asks_next(self) -> bool:
        """Whether the next round may have drafts. If not, the engine may launch it before it has this one's tokens."""
        return True

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A draft of at most ``most[i]`` tokens for each row of a pass: tokens, int32 [n, width], of which the first
        ``lengths[i]`` (int64 [n]) are row i's."""
        raise NotImplementedError

    def verified(self, done: Round) -> None:
        """A round has run. Whether ``propose`` was called before it depends on ``wants``."""

    def ran(self, seconds: float) -> None:
        """Record the wall seconds of the last round, including the host's part."""

    def sampled(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Row i of the last proposal got ``tokens[offsets[i] : offsets[i + 1]]`` (int32). ``verified`` and ``ran`` may
        follow after the next proposal, while the device verifies it."""

    def finished(self, requests: Sequence[Request]) -> None:
        """Requests are complete."""

    def released(self, request: Request) -> None:
        """A complete request that was held was released; it gets no new children."""

    def abandoned(self) -> None:
        """All incomplete requests were aborted."""

    def weights_changed(self, policy_version: int) -> None:
        """The weights have changed. No request is running."""

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutEngine``, as for the two methods that follow."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""

    def timing(self) -> dict[str, float]:
        """Metrics of the drafts."""
        return {}


class NoDrafting(Drafting):
    """Never drafts."""

    asks_next = False


def drafts_of(plan: Pass, drafting: Drafting, scheduler: Scheduler, most_tokens: int) -> list[np.ndarray]:
    """The drafts (int32) to verify in a pass, with pages reserved for them. A row that gets no token in this pass has
    no draft, and the pass has at most ``most_tokens`` tokens in total."""
    drafts, ready = [NO_DRAFT] * len(plan.rows), plan.ready
    if not ready or not drafting.wants(len(ready)):
        return drafts
    rows = [plan.rows[i] for i in ready]
    # One token is sampled after the draft, and it must be within the request's length.
    most = np.array([len(row.tokens) - row.num_tokens - 1 for row in rows])
    budget = most_tokens - sum(plan.counts)
    for i, row, draft, length in zip(ready, rows, *drafting.propose(rows, most), strict=True):
        if length := min(int(length), budget):
            length = scheduler.reserve_pages(row, row.num_tokens + length) - row.num_tokens
            drafts[i] = draft[:length]
            budget -= length
    return drafts


def guesses_of(drafts: Sequence[np.ndarray]) -> np.ndarray:
    """The tokens of each draft and a -1 for the one sampled after it, int32."""
    return np.concatenate([part for draft in drafts for part in (draft, _NO_GUESS)])
