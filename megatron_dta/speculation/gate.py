"""Decides for each decoding pass whether drafting is expected to pay, within a bounded overhead.

A pass with drafts is a round of its own: the host makes the drafts, waits for the samples and inserts them before it
knows the next ones, while passes without drafts follow each other on the device. So its cost is not the weights and
its tokens alone, and what counts is measured: all seconds from round to round, the host's included, of both kinds. The
calibrated costs give how they grow with live sequences and tokens; the medians of measured over calibrated seconds give
the rest.

    gain  = sum over accepted tokens of (base / sharers + per_token)      of passes without drafts that need not run
    extra = seconds(pass with these tokens) - seconds(pass of a burst)

A pass has drafts where the expected gain exceeds the extra. Expectations can be wrong, so what came of each such pass
is booked: when the extra has exceeded the gain by ``LOSS_SHARE`` of all time and ``CREDIT`` passes, no pass has drafts
until enough time has gone by. That bounds what speculation can cost whatever the samples are. The same overhead budget
pays for probes, passes with drafts against the gate's advice, without which wrong estimates would stay. After rounds in
vain drafts are looked for ever less often, so that looking costs ``ASKING_SHARE`` of the time.

A clock decides here, so the ranks of a replica may decide by their own clocks only where a replica is one rank;
elsewhere ``is_measured`` is off and the calibrated seconds stand for the measured ones.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

from megatron_dta.speculation.forward_cost import ForwardCost

LOSS_SHARE = 0.004
CREDIT = 1.0
ASKING_SHARE = 0.002
ASKING_SECONDS = 6e-4
"""Of looking for drafts for a batch, besides ``ForwardCost.draft`` for each sequence."""
_RECENT = 31
_RENEWAL = 0.3
_VAIN = 4
"""Rounds in vain after which drafts are no longer likely to come soon."""
_MOST_CREDIT = 0.03
"""What was gained covers later losses up to this share of all time."""


class Rounds:
    """Costs and overhead budget of one engine.

    Args:
        plain: a pass in a burst, by live sequences. drafted: a pass with drafts, by tokens. burst: passes of a burst.
        prices_whole: take a forward that the last sample need not run for a whole one, whatever it drafts itself. That
            drafts more early on: better where the host makes drafts in no time, worse where a round of it costs.

    Attributes:
        is_measured: scale both by what rounds are measured to take.
        tokens_alone: what the sample that will be the last goes on by in a pass with drafts.
        is_hopeful: a draft is likely to be worth it in one of the next rounds.
        elapsed: seconds, as passes without drafts would count. loss: seconds lost by drafts, negative if gained.
    """

    def __init__(self, plain: ForwardCost, drafted: ForwardCost, burst: int = 8, prices_whole: bool = False) -> None:
        self.burst, self.is_measured, self.tokens_alone = burst, True, 1.0
        self.prices_whole = prices_whole
        self.plain_cost, self.drafted_cost = plain, drafted
        self._ratios: dict[bool, deque[float]] = {}
        self._scale: dict[bool, float] = {}
        self.calibrate(plain, drafted)
        self.end_step()

    def calibrate(self, plain: ForwardCost, drafted: ForwardCost) -> None:
        """Go by these costs, and measure anew how far they are off."""
        self.plain_cost, self.drafted_cost = plain, drafted
        self._ratios = {kind: deque(maxlen=_RECENT) for kind in (False, True)}
        self._scale = {False: 1.0, True: 1.0}

    def unlearned(self) -> Rounds:
        """Of the same costs, with nothing measured and a overhead budget of its own."""
        fresh = Rounds(self.plain_cost, self.drafted_cost, self.burst, self.prices_whole)
        fresh.is_measured = self.is_measured
        return fresh

    def end_step(self) -> None:
        """A collection is over: the overhead budget is filled for the next."""
        self.elapsed = self.loss = 0.0
        self.is_hopeful = False
        self._vain = self._wait = self._probe_wait = self._asked_live = 0
        self._pause = self._probe_pause = 1
        self._probed, self._is_probe = 0.0, False

    def plain(self, live: int) -> float:
        """Seconds of a pass without drafts."""
        return self._scale[False] * float(self.plain_cost.seconds(live))

    def drafted(self, tokens: int) -> float:
        """Seconds of a pass with drafts."""
        return self._scale[True] * float(self.drafted_cost.seconds(tokens))

    def cost(self, live: int) -> ForwardCost:
        """For the gate of single tokens: what a forward saved saves, and what a drafted token costs."""
        base, _ = self._worth(live)
        per_token = self._scale[True] * self.drafted_cost.per_token
        return ForwardCost(base, per_token, self.drafted_cost.knee, self.drafted_cost.draft)

    def gain(self, tokens: np.ndarray, sharers: np.ndarray, live: int) -> float:
        """Seconds that so many accepted tokens of each sample save; [n] each, tokens may be expectations."""
        base, per_token = self._worth(live)
        return float(np.sum(tokens * (base / sharers + per_token)))

    def saved(self, tokens: np.ndarray, sharers: np.ndarray, live: int) -> float:
        """The same against decoding without any drafts."""
        base, per_token = self._parts(live)
        return float(np.sum(tokens * (base / sharers + per_token)))

    @property
    def asks_next(self) -> bool:
        """Whether drafts will be looked for in the next round."""
        return not self._wait

    def wants(self, live: int) -> bool:
        """Whether to look for drafts in this round; to be asked once a round. Not in the first one, which shows what
        a pass without drafts takes."""
        if self.is_measured and not self._ratios[False]:
            return False
        if self._wait:
            # Once half of the samples have ended the answer may be another.
            self._wait = self._wait - 1 if 2 * live > self._asked_live else 0
            return False
        self._asked_live = live
        return True

    def pays(self, gain: float, live: int, tokens: int) -> bool:
        """Whether a pass of ``tokens`` tokens with that expected gain pays and the overhead budget allows it."""
        extra = self.drafted(tokens) - self.plain(live)
        return gain > extra and (extra <= 0 or self.loss <= self._allowed(extra))

    def may_probe(self, gain: float, live: int, tokens: int) -> bool:
        """Whether the overhead budget pays for a pass that is not expected to pay; if so it is to run. What drafts have
        gained is not for probes, and after probes in vain the next one is ever further off."""
        if self._probe_wait:
            self._probe_wait -= 1
            return False
        extra = self.drafted(tokens) - self.plain(live)
        lost = max(self._probed, self.loss) + max(0.0, extra - gain)
        self._is_probe = lost <= self._allowed(extra)
        return self._is_probe

    def in_vain(self, live: int) -> None:
        """Drafts were looked for, and none was worth it."""
        self._vain += 1
        if self._vain < _VAIN and self.is_hopeful:
            return
        self.is_hopeful = False
        seconds = ASKING_SECONDS + self.drafted_cost.draft * live
        longest = int(np.clip(np.ceil(seconds / (ASKING_SHARE * self.burst * self.plain(live))), 1, 32))
        self._wait = min(self._pause, longest)
        self._pause = min(2 * self._pause, longest)

    def ran(self, live: int, passes: int, seconds: float) -> None:
        """A round of ``passes`` passes without drafts took so long."""
        self._measure(False, seconds / passes / float(self.plain_cost.seconds(live)))
        self.elapsed += passes * self.plain(live)

    def went_on(self, tokens: float) -> None:
        """In a pass with drafts the samples that may be the last went on by so many tokens."""
        self.tokens_alone += _RENEWAL * (tokens - self.tokens_alone)

    def ran_drafted(self, live: int, tokens: int, gain: float, seconds: float) -> None:
        """A pass with drafts took so long and had that gain."""
        self._measure(True, seconds / float(self.drafted_cost.seconds(tokens)))
        usual = self.drafted(tokens)
        # What takes far longer than usual, such as a first compilation, is not the drafts' fault.
        seconds = min(seconds, 2 * usual) if self.is_measured else usual
        net = gain - (seconds - self.plain(live))
        self.elapsed += self.plain(live) + gain
        self.loss = max(self.loss - net, -_MOST_CREDIT * self.elapsed)
        if self._is_probe:
            self._is_probe = False
            self._probed += max(0.0, -net)
            self._probe_wait = 0 if net > 0 else self._probe_pause
            self._probe_pause = 1 if net > 0 else min(2 * self._probe_pause, 32)
            if net <= 0:
                self.in_vain(live)
                return
        self._vain, self.is_hopeful = 0, net > 0 or self.loss < 0
        if self.is_hopeful:
            self._pause = 1
        else:
            self.in_vain(live)

    def _allowed(self, extra: float) -> float:
        return LOSS_SHARE * self.elapsed + CREDIT * max(0.0, extra)

    def _worth(self, live: int) -> tuple[float, float]:
        """Seconds that are saved where the last sample need not run one more pass, and where a sample need not run in
        one. By the time that the last one is alone it drafts, if that pays, so that a pass is worth several tokens."""
        base, per_token = self._parts(live)
        if self.prices_whole:
            return base, per_token
        return min(base, self.drafted(self.tokens_alone) / self.tokens_alone), per_token

    def _parts(self, live: int) -> tuple[float, float]:
        """Of a pass without drafts: seconds for itself, and for each sequence."""
        cost, scale = self.plain_cost, self._scale[False]
        return scale * cost.base, scale * (float(cost.seconds(live)) - cost.base) / live

    def _measure(self, is_drafted: bool, ratio: float) -> None:
        if not self.is_measured:
            return
        ratios = self._ratios[is_drafted]
        ratios.append(ratio)
        self._scale[is_drafted] = median(ratios)
        if not is_drafted and not self._ratios[True]:
            # Until one has run: what is off for one kind is for the other.
            self._scale[True] = self._scale[False]
