"""Keeps complete samples until drafts are tried, since a batch without drafts needs none of them.

All are learned when a trial of drafts begins or a checkpoint is written, or dropped unlearned when they are as old as
what a drafter evicts.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from megatron_dta.sampling.speculation.speculator import Speculator


class WaitingSamples:
    """Samples in the order in which they ended: policy step, problem, prompt and response."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, str, np.ndarray, np.ndarray]] = deque()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, step: int, problem: str, prompt: np.ndarray, response: np.ndarray) -> None:
        """Keep a sample of policy step ``step``."""
        self._samples.append((step, problem, prompt, response))
        self.tokens += len(response)

    def drop(self, oldest: int, max_tokens: int) -> None:
        """Drop samples up to step ``oldest``, and the first ones beyond ``max_tokens`` tokens of responses."""
        while self._samples and (self._samples[0][0] <= oldest or self.tokens > max_tokens):
            self.tokens -= len(self._samples.popleft()[-1])

    def learn(self, speculator: Speculator) -> None:
        """Let ``speculator`` learn all samples."""
        for step, problem, prompt, response in self._samples:
            speculator.learn(problem, prompt, response, step)
        self._samples.clear()
        self.tokens = 0
