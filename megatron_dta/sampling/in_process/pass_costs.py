"""Measures the cost of passes on the engine before it samples rollouts.

Whether a draft pays depends on the seconds of a pass (c_base) and of a token in it (c_tok). Before the first rollouts
they are measured with a few short runs of synthetic requests, with few and many rows, with drafts of a fixed length and
without. The runs take a fraction of a second. They also compile or capture what the first rollout batch needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_dta.sampling.in_process.drafting import Drafting, Round
from megatron_dta.sampling.in_process.engine import InProcessEngine
from megatron_dta.sampling.in_process.scheduler import Request
from megatron_dta.sampling.interface import GenerationRequest, generate, phase
from megatron_dta.sampling.params import SamplingParams

_PASSES = 6
"""Passes of each kind; their median is used."""
_WIDTHS = (0, 3, 7)
_CONTEXT = 2
_NO_END = -1


class _FixedDrafts(Drafting):
    """Drafts ``width`` arbitrary tokens per row; records passes as (tokens, seconds, has drafts)."""

    is_hopeful = False

    def __init__(self, width: int) -> None:
        self.width = width
        self.passes: list[tuple[int, float, bool]] = []
        self._last: list[tuple[int, bool]] = []

    def wants(self, live: int) -> bool:
        return self.width > 0

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> list[np.ndarray]:
        return [np.zeros(max(0, min(self.width, limit)), np.int32) for limit in most.tolist()]

    def verified(self, done: Round) -> None:
        self._last = done.decoding_passes

    def ran(self, seconds: float) -> None:
        last, self._last = self._last, []
        self.passes += [(tokens, seconds / len(last), is_drafted) for tokens, is_drafted in last]


def measure_passes(
    engine: InProcessEngine, params: SamplingParams, rows: int, max_length: int
) -> list[tuple[int, float, bool]]:
    """Measures passes that only decode, as (tokens, seconds, has drafts). Collective over all ranks.

    Args:
        engine: an engine without requests; its drafting is restored afterwards.
        params: sampling parameters of rollouts; the end-of-sequence token is ignored.
        rows: maximum number of running requests.
        max_length: maximum number of tokens of a request.
    """
    params = SamplingParams(1, _NO_END, params.temperature, params.top_p, params.seed)
    drafting, measured = engine.drafting, []
    # On a GPU the first run compiles and captures, so its passes are not used.
    runs = 2 if torch.cuda.is_available() else 1
    try:
        for count in sorted({1, max(2, rows // 8), max(3, rows // 2), rows}):
            for width in _WIDTHS:
                most = min(_PASSES + width, max_length - _CONTEXT)
                requests = [GenerationRequest(i, np.zeros(_CONTEXT, np.int32), most, i) for i in range(count)]
                for _ in range(runs):
                    drafts = engine.drafting = _FixedDrafts(width)
                    with phase(engine, params, 0):
                        generate(engine, requests)
                measured += drafts.passes
    finally:
        engine.drafting = drafting
    return measured
