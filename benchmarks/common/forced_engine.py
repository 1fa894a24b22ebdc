"""An in-process engine that takes recorded tokens instead of its own, and draftings for measurements.

The cost of a forward depends on the number of its tokens and not on their values. So the engine runs every forward and
then takes the recorded tokens in place of the drawn ones. A draft is accepted as far as it agrees with the record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_dta.sampling.in_process.bursts import Drawn
from megatron_dta.sampling.in_process.drafting import Drafting, NoDrafting, Round
from megatron_dta.sampling.in_process.engine import InProcessEngine
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, generate


@dataclass(frozen=True)
class WaveTime:
    """Times of requests that began together.

    Attributes:
        seconds: from their submission to the completion of the last one.
        prompt_seconds: the part until the last one had its first token; others may have more tokens by then.
        forwards, prompt_forwards: passes in these times.
        captures: graphs captured in this time.
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
        """Mean seconds of the passes after the prompts; 0 without any."""
        passes = self.forwards - self.prompt_forwards
        return (self.seconds - self.prompt_seconds) / passes if passes else 0.0


class ForcedEngine(InProcessEngine):
    """A request with key k gets ``recorded[k]`` (int32) or its beginning; requests with other keys get what is drawn.

    Attributes:
        own: by key, the tokens that the engine drew after each prefix of the record, and their logprobs; with bursts of
            one pass, since the inputs of other passes are the engine's own tokens.
    """

    def __init__(self, recorded: dict[int, np.ndarray], *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._recorded = recorded
        self._drafts_static = False  # ``DraftedRows`` compare drafts with what was drawn
        self.own = {key: (np.full(len(tokens), -1), np.zeros(len(tokens))) for key, tokens in recorded.items()}
        self._prompts_over, self._prompt_forwards = 0.0, 0

    def draft_with(self, drafting: Drafting | None) -> None:
        """Use another drafting from now on, while nothing runs; captured graphs are kept."""
        self.drafting = drafting or NoDrafting()

    def timed(self, requests: Sequence[GenerationRequest]) -> tuple[list[GenerationResult], WaveTime]:
        """Run the requests alone. Every pass waits for the device, so the host's clock measures the device."""
        before = self.statistics()
        self._prompts_over = began = time.perf_counter()
        results = generate(self, requests)
        ended, after = time.perf_counter(), self.statistics()
        forwards, captures = (int(after[name] - before[name]) for name in ("forwards", "captures"))
        prompt_forwards = self._prompt_forwards - int(before["forwards"])
        return results, WaveTime(ended - began, self._prompts_over - began, forwards, prompt_forwards, captures)

    def _take(self, drawn: Drawn, began: float, num_tokens: int, computed: int) -> list[Request]:
        begins, forced = drawn.counts.cumsum() - drawn.counts, drawn.tokens.copy()
        done = [row.num_tokens - row.context_length for row in drawn.rows]
        recorded = [
            (row, first, begin, count)
            for row, first, begin, count in zip(drawn.rows, done, begins.tolist(), drawn.counts.tolist(), strict=True)
            if row.generation.key in self._recorded
        ]
        for row, first, begin, count in recorded:
            forced[begin : begin + count] = self._recorded[row.generation.key][first : first + count]
        ended = super()._take(replace(drawn, tokens=forced), began, num_tokens, computed)
        for row, first, begin, _ in recorded:
            count = row.num_tokens - row.context_length - first if drawn.guesses is not None else 1
            tokens, logprobs = self.own[row.generation.key]
            tokens[first : first + count] = drawn.tokens[begin : begin + count]
            logprobs[first : first + count] = drawn.logprobs[begin : begin + count]
        if 0 in done:
            self._prompts_over, self._prompt_forwards = time.perf_counter(), int(self._counts["forwards"])
        return ended


class FixedDrafting(Drafting):
    """Drafts the same number of tokens in every pass.

    Attributes:
        width: of each row's draft.
        ends: the end times of the passes, by their number of tokens.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.ends: dict[int, list[float]] = {}

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(rows), self.width), np.int32), np.minimum(most, self.width)

    def verified(self, done: Round) -> None:
        passes = max(map(len, done.appended)) if done.drafted is None else 1
        self.ends.setdefault(done.num_tokens, []).extend([time.perf_counter()] * passes)


class KnownDrafting(Drafting):
    """Drafts up to ``width`` tokens of the expected answer of each key; one draft in five has a wrong token."""

    def __init__(self, answers: dict[int, np.ndarray], width: int, vocab_size: int, seed: int) -> None:
        self._answers, self._width, self._vocab_size = answers, width, vocab_size
        self._rng = np.random.default_rng(seed)

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = np.zeros((len(rows), self._width), np.int32), np.zeros(len(rows), np.int64)
        for i, (row, limit) in enumerate(zip(rows, most.tolist(), strict=True)):
            done = row.num_tokens - row.context_length
            draft = self._answers[row.generation.key][done:][: min(limit, self._width)].copy()
            if len(draft) and self._rng.random() < 0.2:
                draft[self._rng.integers(0, len(draft))] = self._rng.integers(0, self._vocab_size)
            tokens[i, : len(draft)], lengths[i] = draft, len(draft)
        return tokens, lengths
