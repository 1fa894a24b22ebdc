"""What passes cost on the engine that runs, measured before it samples anything.

Whether a draft is worth it is a matter of seconds: of a pass (c_base) and of a token in it (c_tok). Until rollouts have
shown them, they are those of a few short runs of made-up requests: few rows and many, with drafts of a fixed length and
without. They take a fraction of a second and compile, or capture, what the first collection needs anyhow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.sampling.engines.in_process.drafting import Drafting
from megatron_dta.sampling.engines.in_process.engine import InProcessEngine
from megatron_dta.sampling.engines.in_process.scheduler import Request
from megatron_dta.sampling.engines.interface import GenerationRequest, generate, phase
from megatron_dta.sampling.params import SamplingParams

_PASSES = 6
"""Of each kind; what counts is their median."""
_WIDTHS = (0, 3, 7)
_CONTEXT = 2
_NO_END = -1


class SilentDrafting(Drafting):
    """Drafts that need to know of nothing but the rows of a pass."""

    def submitted(self, sequence: Request) -> None: ...

    def verified(self, drafted: np.ndarray, appended: list[np.ndarray], seconds: float, tokens: int) -> None: ...

    def finished(self, sequence: Request) -> None: ...

    def released(self, sequence: Request) -> None: ...

    def abandoned(self) -> None: ...

    def weights_changed(self, policy_version: int) -> None: ...


class _FixedDrafts(SilentDrafting):
    """As many drafted tokens in every pass, right or not; notes (tokens, seconds, whether some were drafted)."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.passes: list[tuple[int, float, bool]] = []
        self._last: list[tuple[int, bool]] = []

    @property
    def is_hopeful(self) -> bool:
        return False

    def wants(self, live: int) -> bool:
        return self.width > 0

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> list[np.ndarray]:
        return [np.zeros(max(0, min(self.width, limit)), np.int32) for limit in most.tolist()]

    def verified(self, drafted: np.ndarray, appended: list[np.ndarray], seconds: float, tokens: int) -> None:
        is_pure = tokens == len(drafted) + int(drafted.sum())
        self._last = [(tokens, tokens > len(drafted))] if is_pure else []

    def verified_burst(
        self, rows: Sequence[Request], appended: Sequence[np.ndarray], seconds: float, tokens: int
    ) -> None:
        self._last = [(tokens, False)] * max(map(len, appended)) if tokens == len(rows) else []

    def ran(self, seconds: float) -> None:
        last, self._last = self._last, []
        self.passes += [(tokens, seconds / len(last), is_drafted) for tokens, is_drafted in last]


def measure_passes(
    engine: InProcessEngine, params: SamplingParams, rows: int, max_length: int
) -> list[tuple[int, float, bool]]:
    """(tokens, seconds, whether some were drafted) of passes that only decode; all ranks call this together.

    Args:
        engine: without requests; it drafts again as before afterwards.
        params: as rollouts are sampled; ends of sequence are left out.
        rows: most sequences that run at once. max_length: most tokens of one.
    """
    params = SamplingParams(1, _NO_END, params.temperature, params.top_p, params.seed)
    given, found = engine.drafting, []
    try:
        for count in sorted({1, max(2, rows // 8), max(3, rows // 2), rows}):
            for width in _WIDTHS:
                most = min(_PASSES + width, max_length - _CONTEXT)
                requests = [GenerationRequest(i, np.zeros(_CONTEXT, np.int32), most, i) for i in range(count)]
                for _ in range(2):  # The first one compiles and captures; a burst takes long then as a whole.
                    drafts = engine.drafting = _FixedDrafts(width)
                    with phase(engine, params, 0):
                        generate(engine, requests)
                found += drafts.passes
    finally:
        engine.drafting = given
    return found
