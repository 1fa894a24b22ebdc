"""Decides by measured seconds which rounds of decoding may have drafts.

Without drafts the engine launches bursts ahead, so whoever asks for drafts has lost time even if there are none. Rounds
therefore do without, until a *trial*: ``TRIAL_ROUNDS`` rounds with drafts, whose seconds are compared with those of the
passes without that they replace, at about as many running rows. While trials win, the next one follows; one that loses
may use up what the last ones have won, up to ``_MOST_CARRIED`` passes. Otherwise rounds with about as many rows wait,
twice as long each time. Where no pass without drafts was measured yet, or not for ``_RENEWAL`` batches, some run first.

A round replaces as many passes as the likely last rows have got tokens (the mean, weighted by each row's probability of
being the last one), since other rows do not shorten the phase. This is an estimate. When the phase has ended it is
known which sample would have ended last without drafts, and ``PlainSchedule`` says what they have saved. This corrects
the account and what is carried into the next phase; if that is a loss, drafts stop.

Filling the trees when a trial begins takes time, as does the capture of a graph for each size of passes with drafts.
These seconds are spent once and do not decide whether drafts win. But no trial begins that may raise all that was spent
and lost, less what drafts have saved, above ``LOSS_SHARE`` of the time, or of ``_FIRST_SECONDS`` in a shorter run.

The ranks of a replica must decide alike. Where there are several, they use the medians of the first rank up to the last
rollout batch (``share``) in place of the seconds of this round, and estimates alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median

TRIAL_ROUNDS = 6
LOSS_SHARE, _FIRST_SECONDS = 0.01, 15.0
_MOST_CARRIED, _RENEWAL = 40, 16
_RECENT, _FEWEST = 15, 3
"""Rounds over which a median is taken."""
_FIRST_WAIT, _LONGEST_WAIT = 32, 4096
"""Passes without drafts before a trial."""
_UNKNOWN = 2.0
"""Assumed seconds of a round with drafts, over those of a pass without, before one was measured."""
_CAPTURE_SECONDS = 0.05
"""Assumed seconds to capture a graph."""
_FEW = 5
"""The size (bits) of a batch of a few rows, up to which a pass takes about as long."""

Rates = dict[tuple[bool, int], float]


@dataclass(eq=False, slots=True)
class PlainEnd:
    """A sample, and the seconds after which it would have its tokens without drafts (None until these are counted)."""

    seconds: float | None


@dataclass
class PlainSchedule:
    """What the rounds of a phase took, and what they would have taken without drafts.

    Without drafts each running sample gets a token in every pass, so the one that needs most passes ends the phase.
    Their seconds are those that were measured at as many running rows. A sample that waited for a row begins when the
    first one has ended. Before the first round that may have drafts nothing is counted by sample.

    Attributes:
        took: measured seconds of the rounds.
        plain: the part of it before the first round that may have drafts.
        is_plain: no round could have drafts yet.
        captured: seconds of rounds with drafts in which a graph was captured.
        latest: seconds without drafts until the last sample has its tokens.
        ended: samples that are complete since the last round.
        free: heap of the seconds after which rows are free for others.
    """

    took: float = 0.0
    plain: float = 0.0
    is_plain: bool = True
    captured: float = 0.0
    latest: float = 0.0
    ended: list[PlainEnd] = field(default_factory=list)
    free: list[float] = field(default_factory=list)

    def skip(self, seconds: float) -> None:
        """Record a round of ``seconds`` while ``is_plain``."""
        self.plain = self.took = self.latest = self.plain + seconds
        self.ended.clear()

    def advance(self, samples: Sequence[PlainEnd], counts: Sequence[int], pass_seconds: float, seconds: float) -> None:
        """Record a round of ``seconds`` in which the samples got ``counts`` tokens, each in ``pass_seconds``."""
        self.took, self.is_plain = self.took + seconds, False
        # Those that end in this round free their rows after it.
        ending = set(samples).intersection(self.ended)
        for sample in self.ended:
            if sample not in ending:
                heappush(self.free, sample.seconds or 0.0)
        self.ended = list(ending)
        for sample, count in zip(samples, counts, strict=True):
            if sample.seconds is None:
                sample.seconds = heappop(self.free) if self.free else self.plain
            sample.seconds += count * pass_seconds
            self.latest = max(self.latest, sample.seconds)


class DraftingClock:
    """Counts what rounds with and without drafts take, and decides which come next.

    Attributes:
        is_on: whether the next rounds may have drafts.
        is_due: whether a trial may begin as soon as the time for its trees is affordable (``begin``).
        is_local: whether this rank decides alone, by the seconds of this round.
        saved: seconds saved by drafts since ``begin_batch``, in phases that have ended; negative: lost.
    """

    def __init__(self) -> None:
        self.is_on, self.is_due, self.is_local = False, False, True
        self.saved = self._gained = self._last_gained = self._elapsed = self._lost = self._net = 0.0
        self._risk = self._price = 0.0  # expected seconds of the next trial, and of its trees
        self._pass_seconds = self._carried = self._estimated = 0.0  # the last one: saved in this phase
        self._rounds, self._batches, self._measures = 0, 0, False
        self._recent: dict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._shared: Rates = {}
        self._captured_sizes: set[int] = set()  # of which passes with drafts have run
        self._waits: dict[int, int] = defaultdict(lambda: _FIRST_WAIT)
        self._passes: dict[int, float] = defaultdict(float)

    @property
    def asks(self) -> bool:
        """Whether the next round may have drafts: ``is_on``, and passes of about as many rows were measured without."""
        return self.is_on and not self._measures

    def begin_batch(self) -> None:
        """Begin a rollout batch."""
        self.saved, self._gained, self._last_gained, self._price = 0.0, 0.0, self._gained, 0.0
        self._batches += 1
        if self._batches % _RENEWAL == 0:
            self._recent.clear()

    def rates(self) -> Rates:
        """Median seconds a pass by (with drafts, size of the batch)."""
        return {key: median(recent) for key, recent in self._recent.items() if len(recent) >= _FEWEST}

    def share(self, rates: Rates) -> None:
        """Decide by ``rates`` until the next call."""
        self.is_local, self._shared = False, rates

    def took(self, live: int, passes: float, seconds: float, asked: bool) -> None:
        """Record a round of ``live`` rows. ``asked``: it could have drafts, and took the place of ``passes`` passes."""
        size = max(live.bit_length(), _FEW)
        self._recent[asked, size].append(seconds / passes)
        if asked:
            self._captured_sizes.add(size)
        plain = self.rate(False, live)
        self._measures = plain is None
        if plain is None:
            return
        self._pass_seconds = plain
        if not self.is_local:
            seconds = passes * (plain if not asked else self._shared.get((True, size), _UNKNOWN * plain))
        self._elapsed += passes * plain
        if asked:
            self._tried(size, passes * plain - seconds, plain)
            return
        self._passes[size] += passes
        # A round that was launched before a trial began is none of it.
        self._risk = TRIAL_ROUNDS * (_UNKNOWN - 1) * plain + _CAPTURE_SECONDS * (size not in self._captured_sizes)
        self.is_due = not self.is_on and self._passes[size] >= self._waits[size] and self._affords(self._price)

    def begin(self, seconds: float) -> None:
        """Begin a trial that is due if the ``seconds`` to fill the trees are affordable, which only grow in a batch."""
        self.is_on, self.is_due, self._price = self._affords(seconds), False, seconds

    def goes_on(self, seconds: float) -> bool:
        """Whether drafts stay in a phase although filling the trees takes ``seconds``: if they have saved more in
        the last rollout batch, or the time allows it."""
        self.is_on = self.is_on and (seconds <= self._last_gained or self._affords(seconds))
        return self.is_on

    def spend(self, seconds: float, expected: float) -> None:
        """Record what the trees took, and what all ranks expect this to be."""
        self.saved -= seconds
        self._lost += seconds if self.is_local else expected

    def captured(self, seconds: float) -> None:
        """Record a round with drafts of ``seconds`` in which a graph was captured."""
        # A compilation, which may be part of it, is needed once on a machine.
        self._lost += min(seconds, 2 * _CAPTURE_SECONDS) if self.is_local else _CAPTURE_SECONDS
        self.is_on = self.is_on and self._lost <= self._allowed()  # a large batch needs several graphs

    def end_phase(self, schedule: PlainSchedule) -> None:
        """End a phase with ``schedule``, in which drafts saved what it says and not what was expected."""
        saved, net = schedule.latest - schedule.took, self._estimated
        self.saved, self._estimated = self.saved + saved, 0.0
        if schedule.is_plain or not self.is_local:
            return
        won = saved + schedule.captured
        self._gained += won - net
        self._lose(net - won)
        carried = min(self._carried + won, _MOST_CARRIED * self._pass_seconds)
        self.is_on, self._rounds = carried > 0 and (self.is_on or won > 0), 0
        self._net = self._carried = carried if self.is_on else 0.0

    def _lose(self, seconds: float) -> None:
        """Count a loss; of what was saved, as much as may be lost remains for later trials."""
        self._lost = max(self._lost + seconds, -self._allowed())

    def _allowed(self) -> float:
        return LOSS_SHARE * max(self._elapsed, _FIRST_SECONDS)

    def _affords(self, seconds: float) -> bool:
        return self._lost + self._risk + seconds <= self._allowed()

    def _tried(self, size: int, net: float, pass_seconds: float) -> None:
        """Record a round of a trial that saved ``net`` seconds; end the trial if it is complete or too expensive."""
        self._estimated += net
        self._gained += net
        self._lose(-net)
        if not self.is_on:  # launched before the last trial had ended
            return
        self._net, self._rounds = self._net + net, self._rounds + 1
        if self._rounds < TRIAL_ROUNDS and self._net > -TRIAL_ROUNDS * pass_seconds:
            return
        self.is_on = self._net > 0
        self._waits[size] = _FIRST_WAIT if self.is_on else min(2 * self._waits[size], _LONGEST_WAIT)
        self._net = min(self._net, _MOST_CARRIED * pass_seconds) if self.is_on else 0.0
        self._rounds, self._passes[size] = 0, 0

    def rate(self, asked: bool, live: int) -> float | None:
        """Median seconds a pass of about ``live`` rows, with drafts or without; None if too few have run."""
        key = asked, max(live.bit_length(), _FEW)
        if not self.is_local:
            return self._shared.get(key)
        recent = self._recent[key]
        return median(recent) if len(recent) >= _FEWEST else None
