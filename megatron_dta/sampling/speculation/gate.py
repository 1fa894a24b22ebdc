"""Decides how many drafted tokens to verify, and which decoding passes have drafts, within a bounded overhead.

**Tokens** (``token_gate``). Verifying one more drafted token costs c_tok. If it is accepted, its sample needs one
forward fewer. That saves the token of that forward, c_tok, and the sample's share of the forward's fixed cost,
c_base / S, where S samples share a forward. A token is drafted only if its probability of being accepted, given the
draft before it, is at least

    c_tok / (c_tok + c_base / S)

If the forward's cost is flat up to a knee, the tokens below the knee are free and the most probable ones fill it. S is
the live batch or, better, the inverse of the probability that the sample is the last to end (``lengths.py``), since
only the last sample's forwards delay the end of the batch.

Example: c_base = 8 ms, c_tok = 0.03 ms. With S = 100 samples the threshold is 0.03 / (0.03 + 0.08) = 0.27. A sample
that is certain to end last (S = 1) drafts every token with a probability of at least 0.03 / 8.03 = 0.0037.

**Passes** (``SpeculationGate``). A pass with drafts is a round of its own: the host makes the drafts, waits for the
sampled tokens and inserts them before it can draft again. Passes without drafts run back to back on the device, in
bursts. Each kind therefore has its cost.

    gain  = sum over accepted tokens of (base / sharers + per_token)      seconds of passes that need not run
    extra = seconds(pass with these tokens) - seconds(pass of a burst)

Where no clock decides (``clock``), a pass runs with drafts if the expected gain exceeds the extra time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.native import load_library

_RENEWAL = 0.3
"""Weight of the newest pass in the moving average ``last_tokens``."""


def gate_thresholds(cost: ForwardCost, sharers: np.ndarray) -> np.ndarray:
    """The least probability of a token to be drafted, float64 [n], where ``sharers`` [n] samples share each sample's
    forwards.
    """
    return cost.per_token / (cost.per_token + cost.base / np.maximum(sharers, 1.0))


def token_gate(accept: np.ndarray, allowed: np.ndarray, thresholds: np.ndarray, free: int) -> np.ndarray:
    """How many tokens of each draft to verify, int64 [n].

    Args:
        accept: float64 [n, width], the probability that positions 0 .. j are accepted; non-increasing along a row.
        allowed: int [n], maximum number of tokens to verify, at most the draft's length.
        thresholds: see ``gate_thresholds``.
        free: tokens below the knee besides one of each sequence of the forward.
    """
    accept, allowed = np.ascontiguousarray(accept), np.ascontiguousarray(allowed, np.int64)
    lengths, filled = np.empty((2, len(accept)), np.int64)
    # Of equally probable tokens, those of the first rows are chosen, so all ranks make the same choice.
    inputs = accept.ctypes.data, allowed.ctypes.data, thresholds.ctypes.data, free
    load_library().sf_gate(*accept.shape, *inputs, lengths.ctypes.data, filled.ctypes.data)
    return lengths


@dataclass
class SpeculationGate:
    """The pass-level gate of one engine and its costs.

    Attributes:
        plain_cost: cost of one pass of a burst as a function of live sequences.
        drafted_cost: cost of a pass with drafts as a function of tokens.
        prices_whole: value a forward saved for the last sample at its full cost, even if that sample drafts. More
            drafts run early in a wave. It is better if drafting takes the host no time and worse if a round has a cost.
        decides: False if a clock decides which passes have drafts (``clock``), and this gate only about tokens.
        free_tokens: tokens of a pass up to which the last one costs nothing; the most of a pass of half as many
            sequences.
        last_tokens: moving average of the tokens that the likely last sample advances by in a pass with drafts.
    """

    plain_cost: ForwardCost
    drafted_cost: ForwardCost
    prices_whole: bool = False
    decides: bool = True
    free_tokens: int = 0
    last_tokens: float = field(default=1.0, init=False)

    def cost(self, live: int) -> ForwardCost:
        """Costs for the token-level gate: the value of a saved forward and the price of a drafted token."""
        base, _ = self._worth(live)
        per_token, knee = self.drafted_cost.per_token, self.drafted_cost.knee
        if 2 * live <= self.free_tokens:
            per_token, knee = 1.0, self.free_tokens  # a larger pass is another graph
        return ForwardCost(base, per_token, max(knee, self.free_tokens), self.drafted_cost.draft)

    def gain(self, tokens: np.ndarray, sharers: np.ndarray, live: int) -> float:
        """Seconds saved by ``tokens`` [n] accepted tokens, also expected ones, of samples in a pass of ``live``;
        ``sharers`` [n] samples share the forwards of each."""
        base, per_token = self._worth(live)
        return float(np.sum(tokens * (base / sharers + per_token)))

    def pays(self, gain: float, live: int, tokens: int) -> bool:
        """Whether a pass of ``tokens`` tokens with this expected gain pays."""
        return gain > float(self.drafted_cost.seconds(tokens) - self.plain_cost.seconds(live))

    def record_progress(self, tokens: float) -> None:
        """Record by how many tokens the likely last samples advanced in a pass with drafts."""
        self.last_tokens += _RENEWAL * (tokens - self.last_tokens)

    def _worth(self, live: int) -> tuple[float, float]:
        """Seconds saved by one pass fewer for the last sample, and by one sequence fewer in a pass. The last sample
        drafts itself once it runs alone, if that pays, so one of its passes is then worth several tokens."""
        base, seconds = self.plain_cost.base, float(self.plain_cost.seconds(live))
        drafted = float(self.drafted_cost.seconds(self.last_tokens)) / self.last_tokens
        return base if self.prices_whole else min(base, drafted), (seconds - base) / live
