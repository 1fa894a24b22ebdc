"""What speculation did in one rollout: filled by an engine or a replay, read as metrics, JSON and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_dta.speculation.budgets import LengthClass

DECILES = 10


@dataclass
class SpeculationReport:
    """Counts of one rollout. A step of a sequence is its part in one forward: one token, and those accepted.

    Attributes:
        live: sequences in each forward.
        tokens: tokens in each forward, drafted ones included.
        seconds: of each forward, measured or by a cost model.
        lengths, steps, drafted, accepted, classes: of each finished sample: generated tokens, its steps, its drafted
            and accepted tokens, and the length class that it began with.
        queries: drafts that were looked for. draft_seconds: CPU time of making and accounting them. hidden_seconds: of
            accounting for forwards without drafts, beside a device that runs the next ones.
        drafter_bytes, drafter_tokens: memory of the trees and tokens in them, at the end.
        stopped: samples stopped for degenerate text.
    """

    live: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    queries: int = 0
    draft_seconds: float = 0.0
    hidden_seconds: float = 0.0
    drafter_bytes: int = 0
    drafter_tokens: int = 0
    stopped: int = 0

    def add_forward(self, live: int, tokens: int, seconds: float) -> None:
        self.live.append(live)
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    def add_sample(self, length: int, steps: int, drafted: int, accepted: int, length_class: int) -> None:
        self.lengths.append(length)
        self.steps.append(steps)
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        self.classes.append(length_class)

    @property
    def makespan(self) -> float:
        return float(np.sum(self.seconds))

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens for each step of a sequence; 1 without speculation."""
        return _ratio(np.sum(self.lengths), np.sum(self.steps))

    def tokens_per_forward_by_decile(self) -> list[float | None]:
        """The same by length, the shortest tenth of the samples first; None where there are too few samples."""
        order = np.argsort(self.lengths, kind="stable")
        parts = np.array_split(order, DECILES)
        lengths, steps = np.asarray(self.lengths), np.asarray(self.steps)
        return [_ratio(lengths[part].sum(), steps[part].sum()) if len(part) else None for part in parts]

    def tokens_per_forward_by_class(self) -> dict[str, float | None]:
        lengths, steps, classes = map(np.asarray, (self.lengths, self.steps, self.classes))
        rows = {c.name.lower(): classes == c for c in LengthClass}
        return {name: _ratio(lengths[r].sum(), steps[r].sum()) if r.any() else None for name, r in rows.items()}

    def longest_tokens_per_forward(self, samples: int = 4) -> float:
        """Of the longest samples, which decide when a rollout is done."""
        order = np.argsort(self.lengths, kind="stable")[-samples:]
        return _ratio(np.asarray(self.lengths)[order].sum(), np.asarray(self.steps)[order].sum())

    def figures(self) -> dict[str, object]:
        """Everything but the courses over time, for JSON."""
        drafted, accepted = int(np.sum(self.drafted)), int(np.sum(self.accepted))
        return {
            "samples": len(self.lengths),
            "generated_tokens": int(np.sum(self.lengths)),
            "forwards": len(self.live),
            "makespan_seconds": self.makespan,
            "tokens_per_forward": self.tokens_per_forward,
            "tokens_per_forward_by_decile": self.tokens_per_forward_by_decile(),
            "tokens_per_forward_by_class": self.tokens_per_forward_by_class(),
            "tokens_per_forward_longest_4": self.longest_tokens_per_forward(4),
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "wasted_tokens": drafted - accepted,
            "draft_queries": self.queries,
            "draft_seconds": self.draft_seconds,
            "hidden_seconds": self.hidden_seconds,
            "drafter_bytes": self.drafter_bytes,
            "drafter_tokens": self.drafter_tokens,
            "drafter_bytes_per_token": _ratio(self.drafter_bytes, self.drafter_tokens),
            "stopped_degenerate": self.stopped,
        }

    def metrics(self) -> dict[str, float]:
        """Flat numbers for the training log; the names begin with ``speculation_``."""
        figures = self.figures()
        names = ("tokens_per_forward", "tokens_per_forward_longest_4", "forwards", "drafted_tokens", "accepted_tokens")
        names += ("wasted_tokens", "draft_queries", "draft_seconds", "hidden_seconds", "drafter_bytes")
        names += ("drafter_tokens", "stopped_degenerate")
        values = {name: float(figures[name]) for name in names}
        values["acceptance"] = _ratio(figures["accepted_tokens"], figures["drafted_tokens"])
        for name, value in figures["tokens_per_forward_by_class"].items():
            if value is not None:
                values[f"tokens_per_forward_{name}"] = value
        for decile, value in enumerate(figures["tokens_per_forward_by_decile"], 1):
            if value is not None:
                values[f"tokens_per_forward_decile_{decile}"] = value
        return {f"speculation_{name}": value for name, value in values.items()}


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else 0.0
