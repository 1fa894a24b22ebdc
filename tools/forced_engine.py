"""The in-process engine made to sample what was sampled elsewhere, and drafts for measurements.

A model with random weights has no use for a drafter. But what a forward costs depends on how many tokens it has, and
not on which: so the engine runs every forward as it would, and then takes the recorded tokens in place of its own. A
draft is then accepted as far as it agrees with the record, as it was when the record was made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np

from megatron_dta.sampling.engines.drafting import Drafting
from megatron_dta.sampling.engines.in_process import InProcessEngine
from megatron_dta.sampling.engines.scheduler import Sequence


class ForcedEngine(InProcessEngine):
    """Its request with key k gives ``recorded[k]`` (int32), of which it may ask for a part."""

    def __init__(self, recorded: dict[int, np.ndarray], *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._recorded = recorded

    def draft_with(self, drafting: Drafting | None) -> None:
        """Use another drafting from now on, while nothing runs; what is captured stays."""
        self._drafting = drafting

    def _take(
        self,
        rows: list[Sequence],
        sampled: list[tuple[np.ndarray, np.ndarray]],
        drafts: list[np.ndarray] | None,
        began: float,
        num_tokens: int,
    ) -> list[Sequence]:
        forced = []
        for row, (own, logprobs) in zip(rows, sampled, strict=True):
            done = row.known - row.context_length
            forced.append((self._recorded[row.request.key][done : done + len(own)], logprobs))
        return super()._take(rows, forced, drafts, began, num_tokens)


class _Silent(Drafting):
    """Drafts that need to know of nothing but the rows of a pass."""

    def submitted(self, sequence: Sequence) -> None: ...

    def verified(self, drafted: np.ndarray, appended: list[np.ndarray], seconds: float, tokens: int) -> None: ...

    def finished(self, sequence: Sequence) -> None: ...

    def released(self, sequence: Sequence) -> None: ...

    def abandoned(self) -> None: ...

    def weights_changed(self, policy_version: int) -> None: ...


class FixedDrafting(_Silent):
    """As many drafted tokens in every pass.

    Attributes:
        width: of each row's draft.
        ends: when each pass ended, by its number of tokens.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.ends: dict[int, list[float]] = {}

    def propose(self, rows: Rows[Sequence], most: np.ndarray) -> list[np.ndarray]:
        return [np.zeros(min(self.width, limit), np.int32) for limit in most.tolist()]

    def verified(self, drafted: np.ndarray, appended: list[np.ndarray], seconds: float, tokens: int) -> None:
        self.ends.setdefault(tokens, []).append(time.perf_counter())


class KnownDrafting(_Silent):
    """Drafts of up to ``width`` tokens of what each key is expected to sample, one in five of them spoiled."""

    def __init__(self, answers: dict[int, np.ndarray], width: int, vocab_size: int, seed: int) -> None:
        self._answers, self._width, self._vocab_size = answers, width, vocab_size
        self._rng = np.random.default_rng(seed)

    def propose(self, rows: Rows[Sequence], most: np.ndarray) -> list[np.ndarray]:
        drafts = []
        for row, limit in zip(rows, most.tolist(), strict=True):
            done = row.known - row.context_length
            draft = self._answers[row.request.key][done:][: min(limit, self._width)].copy()
            if len(draft) and self._rng.random() < 0.2:
                draft[self._rng.integers(0, len(draft))] = self._rng.integers(0, self._vocab_size)
            drafts.append(draft.astype(np.int32))
        return drafts
