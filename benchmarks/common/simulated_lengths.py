"""An engine whose responses have lengths of a given distribution.

The length of a path is drawn again in each request, conditioned on the length so far. So the branches of a path get
different lengths, all longer than the shared part, as with a model. A response that reaches its length is returned as
one that has ended. The tokens are those of the model, or zeros without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from megatron_dta.sampling.interface import FinishReason, GenerationRequest, GenerationResult, RolloutEngine
from megatron_dta.sampling.params import SamplingParams

_NORMAL = NormalDist()


@dataclass(frozen=True)
class LengthDistribution:
    """Lognormal lengths, rounded up, with a mean (before any cap) and the standard deviation of the logarithm."""

    mean: float
    sigma: float

    def draw(self, uniform: float, longer_than: int) -> int:
        """A length above ``longer_than``, by inverting the distribution function at ``uniform`` in [0, 1)."""
        location = math.log(self.mean) - self.sigma**2 / 2
        below = _NORMAL.cdf((math.log(longer_than) - location) / self.sigma) if longer_than else 0.0
        quantile = min(max(below + uniform * (1 - below), 1e-15), 1 - 1e-15)
        length = math.exp(location + self.sigma * _NORMAL.inv_cdf(quantile))
        return max(longer_than + 1, math.ceil(length))


class SimulatedLengths(RolloutEngine):
    """Runs ``inner`` (None: no model) with drawn lengths; all prompts have ``prompt_tokens``."""

    def __init__(self, inner: RolloutEngine | None, lengths: LengthDistribution, prompt_tokens: int) -> None:
        self._inner, self._lengths, self._prompt_tokens = inner, lengths, prompt_tokens
        self._ends: dict[int, bool] = {}
        self._waiting: list[GenerationResult] = []
        self._decoded = 0
        self._seed = 0

    def start(self, params: SamplingParams, iteration: int) -> None:
        self._seed = params.seed
        if self._inner is not None:
            self._inner.start(params, iteration)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        shortened = []
        for request in requests:
            done = len(request.token_ids) - self._prompt_tokens
            uniform = np.random.Generator(np.random.Philox(key=[self._seed, request.key])).random()
            left = self._lengths.draw(float(uniform), done) - done
            self._ends[request.request_id] = left <= request.max_tokens
            shortened.append(replace(request, max_tokens=min(left, request.max_tokens)))
        if self._inner is not None:
            self._inner.submit(shortened)
            return
        for request in shortened:
            tokens = np.zeros(request.max_tokens, np.int32)
            result = GenerationResult(request.request_id, tokens, tokens.astype(np.float32), FinishReason.LENGTH, 0)
            self._waiting.append(result)

    def poll(self, patient: bool = True) -> list[GenerationResult]:
        results, self._waiting = (self._waiting, []) if self._inner is None else (self._inner.poll(patient), [])
        self._decoded += sum(len(result.token_ids) for result in results)
        return [
            replace(
                result, finish_reason=FinishReason.STOP if self._ends.pop(result.request_id) else FinishReason.LENGTH
            )
            for result in results
        ]

    def release(self, request_ids: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.release(request_ids)

    def statistics(self) -> dict[str, float]:
        return {"decoded_tokens": float(self._decoded)} if self._inner is None else self._inner.statistics()

    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        if self._inner is not None:
            self._inner.update_weights(policy_version, checkpoint)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
