"""Keeps complete samples until drafts are tried, since a batch without drafts needs none of them.

All are learned when a trial of drafts begins or a checkpoint is written, or dropped unlearned when they are as old as
what a drafter evicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from megatron_dta.sampling.speculation.speculator import Speculator


class WaitingSamples:
    """Samples in the order in which they ended: of each round its policy step, prompts, and lengths and tokens."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, list[np.ndarray], list[int], np.ndarray]] = deque()
        self.tokens = 0

    def __len__(self) -> int:
        return sum(len(prompts) for _, prompts, *_ in self._rounds)

    def add(self, step: int, prompts: list[np.ndarray], responses: Sequence[np.ndarray]) -> None:
        """Keep samples of policy step ``step`` that ended together."""
        tokens = np.concatenate(responses)
        self._rounds.append((step, prompts, list(map(len, responses)), tokens))
        self.tokens += len(tokens)

    def drop(self, oldest: int, max_tokens: int) -> None:
        """Drop rounds up to step ``oldest``, and the first ones beyond ``max_tokens`` tokens of responses."""
        while self._rounds and (self._rounds[0][0] <= oldest or self.tokens > max_tokens):
            self.tokens -= len(self._rounds.popleft()[-1])

    def learn(self, speculator: Speculator, problem_of: Callable[[np.ndarray], str]) -> None:
        """Let ``speculator`` learn all samples and their lengths, step by step; ``problem_of``: digest of a prompt."""
        while self._rounds:
            step, prompts, lengths, tokens = self._rounds.popleft()
            for prompt, response in zip(prompts, np.split(tokens, np.cumsum(lengths)[:-1]), strict=True):
                problem = problem_of(prompt)
                speculator.learn(problem, prompt, response, step)
                speculator.learn_length(problem, len(response))
            if step < (self._rounds[0][0] if self._rounds else speculator.step):
                speculator.history.end_step()
        self.tokens = 0
