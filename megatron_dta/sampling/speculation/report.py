"""Statistics of speculation in one rollout batch, from an engine or a replay, as metrics, JSON and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class SpeculationReport:
    """Counts of one rollout batch. A step of a sample is its part in one forward: one token and the accepted ones.

    Attributes:
        live: sequences in each forward.
        tokens: tokens in each forward, including drafted ones.
        seconds: seconds of each forward, measured or from a cost model.
        lengths, steps, drafted, accepted: for each finished sample its generated tokens, steps, drafted and accepted
            tokens.
        queries: requested drafts.
        draft_seconds: time to fill the trees, make the drafts and record their outcomes.
        saved_seconds: by the clock (``clock``), with trees and graphs; None without one.
        drafter_bytes, drafter_tokens: memory of the trees and tokens in them, at the end.
        stopped: samples of a replay that were cut because their text degenerated.
    """

    live: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    queries: int = 0
    draft_seconds: float = 0.0
    saved_seconds: float | None = None
    drafter_bytes: int = 0
    drafter_tokens: int = 0
    stopped: int = 0

    def add_forward(self, live: int, tokens: int, seconds: float) -> None:
        self.live.append(live)
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    def add_burst(self, counts: np.ndarray, seconds: float) -> None:
        """Add forwards without drafts, of which sample i takes part in the first ``counts[i]``."""
        passes = int(counts.max())
        for live in (len(counts) - np.searchsorted(np.sort(counts), np.arange(passes), side="right")).tolist():
            self.add_forward(live, live, seconds / passes)

    def add_samples(self, *columns: list[int]) -> None:
        """Add finished samples: their lengths, steps, drafted and accepted tokens."""
        for values, new in zip((self.lengths, self.steps, self.drafted, self.accepted), columns, strict=True):
            values += new

    @property
    def makespan(self) -> float:
        return float(np.sum(self.seconds))

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens for each step of a sequence; 1 without speculation."""
        return _ratio(sum(self.lengths), sum(self.steps))

    def figures(self) -> dict[str, object]:
        """All figures for JSON, without the per-forward lists."""
        drafted, accepted = sum(self.drafted), sum(self.accepted)
        # The longest samples determine when a rollout is done.
        lengths, steps = np.asarray(self.lengths, np.int64), np.asarray(self.steps, np.int64)
        longest = np.argsort(lengths, kind="stable")[-4:]
        return {
            "samples": len(self.lengths),
            "generated_tokens": sum(self.lengths),
            "forwards": len(self.live),
            "makespan_seconds": self.makespan,
            "tokens_per_forward": self.tokens_per_forward,
            "tokens_per_forward_longest_4": _ratio(lengths[longest].sum(), steps[longest].sum()),
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "wasted_tokens": drafted - accepted,
            "draft_queries": self.queries,
            "draft_seconds": self.draft_seconds,
            "drafter_bytes": self.drafter_bytes,
            "drafter_tokens": self.drafter_tokens,
            "drafter_bytes_per_token": _ratio(self.drafter_bytes, self.drafter_tokens),
            "stopped_degenerate": self.stopped,
        }

    def metrics(self) -> dict[str, float]:
        """Flat numbers for the training log; the names begin with ``speculation_``."""
        left_out = ("samples", "drafter_bytes_per_token", "stopped_degenerate")
        values = {name: value for name, value in self.figures().items() if name not in left_out}
        values["acceptance"] = _ratio(values["accepted_tokens"], values["drafted_tokens"])
        values["saved_seconds"] = self.saved_seconds
        return {f"speculation_{name}": float(value) for name, value in values.items() if value is not None}


def drafting_benefit(records: Iterable[Mapping[str, Any]]) -> str | None:
    """One sentence on what drafts gained or lost in a run; None if there were no drafts."""
    # All steps of one rollout batch repeat its figures, so only the first one counts.
    timings = [record.get("timing", {}) for record in records if not record.get("rollout_batch_step")]

    def total(name: str) -> float:
        return sum(timing.get(f"speculation_{name}", 0.0) for timing in timings)

    generated, accepted = total("generated_tokens"), total("accepted_tokens")
    if not generated:
        return None
    shorter = ""
    if any("speculation_saved_seconds" in timing for timing in timings):
        seconds = total("saved_seconds")
        shorter = f"; sampling took about {abs(seconds):.1f} s {'less' if seconds >= 0 else 'longer'} with them"
    return f"DAS: drafts gave {accepted:,.0f} of {generated:,.0f} sampled tokens{shorter}."


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else 0.0
