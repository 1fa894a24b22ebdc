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
bursts. The gate therefore measures the wall time of both kinds of rounds, including the host's part. The calibrated
costs say how the time grows with live sequences and tokens; the median ratio of measured to calibrated seconds scales
them.

    gain  = sum over accepted tokens of (base / sharers + per_token)      seconds of passes that need not run
    extra = seconds(pass with these tokens) - seconds(pass of a burst)

A pass runs with drafts if the expected gain exceeds the extra time.

Expectations can be wrong, so the gate accounts for the actual gain of each pass with drafts. Once the net loss exceeds
``LOSS_SHARE`` of the elapsed time plus ``CREDIT`` passes, no pass has drafts until the elapsed time has grown enough.
This overhead budget bounds what speculation can cost for any samples. It also pays for probes, which are passes with
drafts that are not expected to pay; without them a wrong estimate would never be corrected. After rejected drafts the
gate asks for drafts less and less often, so that asking costs at most ``ASKING_SHARE`` of the time.

The decision depends on a clock. The ranks of a replica must make the same one, so ``is_measured`` is set only where a
replica is one rank. Elsewhere the calibrated seconds replace the measured ones.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

from megatron_dta.sampling.speculation.forward_cost import ForwardCost

LOSS_SHARE = 0.004
CREDIT = 1.0
ASKING_SHARE = 0.002
ASKING_SECONDS = 6e-4
"""Seconds to look for drafts for a batch, in addition to ``ForwardCost.draft`` for each sequence."""
_RECENT = 31
"""Rounds of each kind over which the median ratio is taken."""
_RENEWAL = 0.3
"""Weight of the newest pass in the moving average ``last_tokens``."""
_MAX_REJECTIONS = 4
"""Rejections in a row after which a draft is no longer considered likely in the next rounds."""
_MOST_CREDIT = 0.03
"""Cap on the gains that can offset later losses, as a share of the elapsed time."""


def token_gate(
    accept: np.ndarray, allowed: np.ndarray, cost: ForwardCost, live: int, sharers: np.ndarray
) -> np.ndarray:
    """How many tokens of each draft to verify, int64 [n].

    Args:
        accept: float64 [n, width], the probability that positions 0 .. j are accepted; non-increasing along a row.
        allowed: int [n], maximum number of tokens to verify, at most the draft's length.
        live: sequences in the forward, including those without a draft.
        sharers: float [n], number of samples that share each sample's forwards.
    """
    accept = np.where(np.arange(accept.shape[1]) < allowed[:, None], accept, -1.0)
    threshold = cost.per_token / (cost.per_token + cost.base / np.maximum(sharers, 1.0))
    lengths = (accept >= threshold[:, None]).sum(1)
    free = max(0, int(cost.knee) - live)
    if not free:
        return lengths
    flat = np.flatnonzero(accept.reshape(-1) > 0)
    if len(flat) > free:
        # The stable sort breaks ties by row and position: all ranks make the same choice, and a draft has no gaps.
        order = np.argsort(-accept.reshape(-1)[flat], kind="stable")
        flat = flat[order[:free]]
    within = np.bincount(flat // accept.shape[1], minlength=len(accept))
    return np.maximum(lengths, within)


class SpeculationGate:
    """The pass-level gate of one engine: its costs and its overhead budget.

    Args:
        plain: cost of one pass of a burst as a function of live sequences.
        drafted: cost of a pass with drafts as a function of tokens.
        burst: passes in a burst.
        prices_whole: value a forward saved for the last sample at its full cost, even if that sample drafts. More
            drafts run early in a wave. It is better if drafting takes the host no time and worse if a round has a cost.

    Attributes:
        decides: False if a clock decides which passes have drafts (``clock``), and this gate only about tokens.
        is_measured: scale both costs by the measured time of rounds.
        last_tokens: moving average of the tokens that the likely last sample advances by in a pass with drafts.
        is_hopeful: whether a draft is likely to pay in one of the next rounds.
        elapsed: seconds that the same tokens would have taken without drafts.
        loss: net seconds lost to drafts; negative for a net gain.
    """

    def __init__(self, plain: ForwardCost, drafted: ForwardCost, burst: int = 8, prices_whole: bool = False) -> None:
        self.burst, self.is_measured, self.last_tokens = burst, True, 1.0
        self.prices_whole, self.decides = prices_whole, True
        self.calibrate(plain, drafted)
        self.end_step()

    def calibrate(self, plain: ForwardCost, drafted: ForwardCost) -> None:
        """Replace the costs and reset the measured ratios."""
        self.plain_cost, self.drafted_cost = plain, drafted
        self._ratios: dict[bool, deque[float]] = {kind: deque(maxlen=_RECENT) for kind in (False, True)}
        self._scale = {False: 1.0, True: 1.0}

    def unlearned(self) -> SpeculationGate:
        """A gate with the same costs, no measurements and its own overhead budget."""
        fresh = SpeculationGate(self.plain_cost, self.drafted_cost, self.burst, self.prices_whole)
        fresh.is_measured, fresh.decides = self.is_measured, self.decides
        return fresh

    def end_step(self) -> None:
        """Reset the overhead budget at the end of a rollout batch."""
        self.elapsed = self.loss = 0.0
        self.is_hopeful = False
        self._rejections = self._rounds_to_skip = self._probes_to_skip = self._asked_live = 0
        self._pause = self._probe_pause = 1
        self._probed, self._is_probe = 0.0, False

    def plain(self, live: int) -> float:
        """Seconds of a pass without drafts."""
        return self._scale[False] * float(self.plain_cost.seconds(live))

    def drafted(self, tokens: int) -> float:
        """Seconds of a pass with drafts."""
        return self._scale[True] * float(self.drafted_cost.seconds(tokens))

    def cost(self, live: int) -> ForwardCost:
        """Costs for the token-level gate: the value of a saved forward and the price of a drafted token."""
        base, _ = self._worth(live)
        per_token = self._scale[True] * self.drafted_cost.per_token
        return ForwardCost(base, per_token, self.drafted_cost.knee, self.drafted_cost.draft)

    def gain(self, tokens: np.ndarray, sharers: np.ndarray, live: int) -> float:
        """Seconds saved by ``tokens`` accepted tokens, which may be expected values.

        Args:
            tokens: [n], accepted tokens of each sample.
            sharers: [n], number of samples that share each sample's forwards.
            live: sequences in the pass.
        """
        base, per_token = self._worth(live)
        return float(np.sum(tokens * (base / sharers + per_token)))

    def saved(self, tokens: np.ndarray, sharers: np.ndarray, live: int) -> float:
        """Like ``gain``, but compared with decoding that never drafts."""
        base, per_token = self._parts(live)
        return float(np.sum(tokens * (base / sharers + per_token)))

    @property
    def asks_next(self) -> bool:
        """Whether the next round asks for drafts if no sample ends before it."""
        return not self._rounds_to_skip

    def wants(self, live: int) -> bool:
        """Whether this round should ask for drafts. Call it once a round. The first round never does: it measures a
        pass without drafts."""
        if not self.decides:
            return True
        if self.is_measured and not self._ratios[False]:
            return False
        if self._rounds_to_skip:
            # Ask again early once half of the samples have ended.
            self._rounds_to_skip = self._rounds_to_skip - 1 if 2 * live > self._asked_live else 0
            return False
        self._asked_live = live
        return True

    def pays(self, gain: float, live: int, tokens: int) -> bool:
        """Whether a pass of ``tokens`` tokens with this expected gain pays and fits the overhead budget."""
        if not self.decides:
            return tokens > live
        extra = self.drafted(tokens) - self.plain(live)
        return gain > extra and (extra <= 0 or self.loss <= self._allowed(extra))

    def may_probe(self, gain: float, live: int, tokens: int) -> bool:
        """Whether the overhead budget allows a pass that is not expected to pay. If so, the caller must run it. Gains
        of earlier drafts do not pay for probes. The wait for the next probe doubles after each one that loses."""
        if self._probes_to_skip:
            self._probes_to_skip -= 1
            return False
        extra = self.drafted(tokens) - self.plain(live)
        lost = max(self._probed, self.loss) + max(0.0, extra - gain)
        self._is_probe = lost <= self._allowed(extra)
        return self._is_probe

    def record_rejected(self, live: int) -> None:
        """Record a round that asked for drafts and rejected all of them."""
        if not self.decides:
            return
        self._rejections += 1
        if self._rejections < _MAX_REJECTIONS and self.is_hopeful:
            return
        self.is_hopeful = False
        seconds = ASKING_SECONDS + self.drafted_cost.draft * live
        longest = int(np.clip(np.ceil(seconds / (ASKING_SHARE * self.burst * self.plain(live))), 1, 32))
        self._rounds_to_skip = min(self._pause, longest)
        self._pause = min(2 * self._pause, longest)

    def record_plain(self, live: int, passes: int, seconds: float) -> None:
        """Record the seconds of a round of ``passes`` passes without drafts."""
        self._measure(False, seconds / passes / float(self.plain_cost.seconds(live)))
        self.elapsed += passes * self.plain(live)

    def record_progress(self, tokens: float) -> None:
        """Record by how many tokens the likely last samples advanced in a pass with drafts."""
        self.last_tokens += _RENEWAL * (tokens - self.last_tokens)

    def record_drafted(self, live: int, tokens: int, gain: float, seconds: float) -> None:
        """Record the seconds and the actual gain of a pass with drafts."""
        self._measure(True, seconds / float(self.drafted_cost.seconds(tokens)))
        usual = self.drafted(tokens)
        # An outlier such as a first compilation is not caused by the drafts.
        seconds = min(seconds, 2 * usual) if self.is_measured else usual
        net = gain - (seconds - self.plain(live))
        self.elapsed += self.plain(live) + gain
        self.loss = max(self.loss - net, -_MOST_CREDIT * self.elapsed)
        if self._is_probe:
            self._is_probe = False
            self._probed += max(0.0, -net)
            self._probes_to_skip = 0 if net > 0 else self._probe_pause
            self._probe_pause = 1 if net > 0 else min(2 * self._probe_pause, 32)
            if net <= 0:
                self.record_rejected(live)
                return
        self._rejections, self.is_hopeful = 0, net > 0 or self.loss < 0
        if self.is_hopeful:
            self._pause = 1
        else:
            self.record_rejected(live)

    def _allowed(self, extra: float) -> float:
        return LOSS_SHARE * self.elapsed + CREDIT * max(0.0, extra)

    def _worth(self, live: int) -> tuple[float, float]:
        """Seconds saved by one pass fewer for the last sample, and by one sequence fewer in a pass. The last sample
        drafts itself once it runs alone, if that pays, so one of its passes is then worth several tokens."""
        base, per_token = self._parts(live)
        if self.prices_whole:
            return base, per_token
        return min(base, self.drafted(self.last_tokens) / self.last_tokens), per_token

    def _parts(self, live: int) -> tuple[float, float]:
        """Seconds of a pass without drafts: its fixed part, and its part for each sequence."""
        cost, scale = self.plain_cost, self._scale[False]
        return scale * cost.base, scale * (float(cost.seconds(live)) - cost.base) / live

    def _measure(self, is_drafted: bool, ratio: float) -> None:
        if not self.is_measured:
            return
        ratios = self._ratios[is_drafted]
        ratios.append(ratio)
        self._scale[is_drafted] = median(ratios)
        if not is_drafted and not self._ratios[True]:
            # Until a pass with drafts has run, use the ratio of plain passes for it.
            self._scale[True] = self._scale[False]
