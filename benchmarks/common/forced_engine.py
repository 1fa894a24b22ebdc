"""The in-process engine made to sample what was sampled elsewhere, and drafts for measurements.

A model with random weights has no use for a drafter. But what a forward costs depends on how many tokens it has, and
not on which: so the engine runs every forward as it would, and then takes the recorded tokens in place of its own. A
draft is then accepted as far as it agrees with the record, as it was when the record was made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dta.sampling.engines.in_process.drafting import Drafting
from megatron_dta.sampling.engines.in_process.engine import InProcessEngine
from megatron_dta.sampling.engines.in_process.pass_costs import SilentDrafting
from megatron_dta.sampling.engines.in_process.scheduler import Request
from megatron_dta.sampling.engines.interface import GenerationRequest, GenerationResult, generate


@dataclass(frozen=True)
class WaveTime:
    """Where the time of requests that began together went.

    Attributes:
        seconds: from their submission until the last one was complete.
        prompt_seconds: of these, until the last one had its first token; others may have had more by then.
        forwards, prompt_forwards: passes in these times.
        captures: graphs that were captured meanwhile.
    """

    seconds: float
    prompt_seconds: float
    forwards: int
    prompt_forwards: int
    captures: int

    def __add__(self, other: WaveTime) -> WaveTime:
        return WaveTime(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def pass_seconds(self) -> float:
        """Mean of the passes behind the prompts; 0 without any."""
        passes = self.forwards - self.prompt_forwards
        return (self.seconds - self.prompt_seconds) / passes if passes else 0.0


class ForcedEngine(InProcessEngine):
    """Its request with key k gives ``recorded[k]`` (int32), of which it may ask for a part; one with another key gives
    what it draws.

    Attributes:
        own: by key, the tokens that the engine drew itself behind each prefix of the record, and their logprobs. Passes
            of a burst behind the first have no part in this: their inputs are the engine's own tokens.
    """

    def __init__(self, recorded: dict[int, np.ndarray], *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._recorded = recorded
        self.own = {key: (np.full(len(tokens), -1), np.zeros(len(tokens))) for key, tokens in recorded.items()}
        self._prompts_over, self._prompt_forwards = 0.0, 0

    def draft_with(self, drafting: Drafting | None) -> None:
        """Use another drafting from now on, while nothing runs; what is captured stays."""
        self.drafting = drafting

    def timed(self, requests: Sequence[GenerationRequest]) -> tuple[list[GenerationResult], WaveTime]:
        """Run the requests, which is all that runs. Every pass that gives tokens waits for the device, so the host's
        clock is the device's."""
        before = self.statistics()
        self._prompts_over = began = time.perf_counter()
        results = generate(self, requests)
        ended, after = time.perf_counter(), self.statistics()
        forwards, captures = (int(after[name] - before[name]) for name in ("forwards", "captures"))
        prompt_forwards = self._prompt_forwards - int(before["forwards"])
        return results, WaveTime(ended - began, self._prompts_over - began, forwards, prompt_forwards, captures)

    def _take(
        self,
        rows: list[Request],
        sampled: list[tuple[np.ndarray, np.ndarray]],
        drafts: list[np.ndarray] | None,
        began: float,
        num_tokens: int,
    ) -> list[Request]:
        forced, done = [], [row.num_tokens - row.context_length for row in rows]
        for row, (own, logprobs), first in zip(rows, sampled, done, strict=True):
            record = self._recorded.get(row.generation.key)
            forced.append((own if record is None else record[first : first + len(own)], logprobs))
        ended = super()._take(rows, forced, drafts, began, num_tokens)
        for row, (own, logprobs), first in zip(rows, sampled, done, strict=True):
            if row.generation.key not in self._recorded:
                continue
            taken = row.num_tokens - row.context_length - first if drafts is not None else 1
            tokens, their_logprobs = self.own[row.generation.key]
            tokens[first : first + taken], their_logprobs[first : first + taken] = own[:taken], logprobs[:taken]
        if 0 in done:
            self._prompts_over, self._prompt_forwards = time.perf_counter(), int(self._counts["forwards"])
        return ended


class FixedDrafting(SilentDrafting):
    """As many drafted tokens in every pass.

    Attributes:
        width: of each row's draft.
        ends: when each pass ended, by its number of tokens.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.ends: dict[int, list[float]] = {}

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> list[np.ndarray]:
        return [np.zeros(min(self.width, limit), np.int32) for limit in most.tolist()]

    def verified(self, drafted: np.ndarray, appended: list[np.ndarray], seconds: float, tokens: int) -> None:
        self.ends.setdefault(tokens, []).append(time.perf_counter())


class KnownDrafting(SilentDrafting):
    """Drafts of up to ``width`` tokens of what each key is expected to sample, one in five of them spoiled."""

    def __init__(self, answers: dict[int, np.ndarray], width: int, vocab_size: int, seed: int) -> None:
        self._answers, self._width, self._vocab_size = answers, width, vocab_size
        self._rng = np.random.default_rng(seed)

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> list[np.ndarray]:
        drafts = []
        for row, limit in zip(rows, most.tolist(), strict=True):
            done = row.num_tokens - row.context_length
            draft = self._answers[row.generation.key][done:][: min(limit, self._width)].copy()
            if len(draft) and self._rng.random() < 0.2:
                draft[self._rng.integers(0, len(draft))] = self._rng.integers(0, self._vocab_size)
            drafts.append(draft.astype(np.int32))
        return drafts
