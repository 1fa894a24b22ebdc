"""Charts of speculation: over the steps of a run, and within steps by time, by length and by length class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dta.extras.report.line_chart import COLORS, Series, line_chart, metric_charts
from megatron_dta.extras.report.markup import Markup

_PREFIX = "timing/speculation_"
_CLASSES = ("short", "medium", "long")
_OVER_STEPS: tuple[tuple[str, ...], ...] = (
    ("tokens of a forward pass", "tokens_per_forward"),
    ("the same by length class", *(f"tokens_per_forward_{c}" for c in _CLASSES), "tokens_per_forward_longest_4"),
    ("drafted tokens that were accepted", "acceptance"),
    ("drafted, accepted and wasted tokens", "drafted_tokens", "accepted_tokens", "wasted_tokens"),
    ("wasted tokens by length class", *(f"wasted_tokens_{c}" for c in _CLASSES)),
    ("seconds: all passes of a rollout batch, the drafter", "makespan_seconds", "draft_seconds", "hidden_seconds"),
    ("memory of the trees (bytes)", "drafter_bytes"),
)
# Within a step: title, what is counted from 1 to 10, metrics.
_WITHIN_STEPS = (
    ("live sequences over the time of a rollout batch", "tenth of the makespan", "live_batch_tenth"),
    ("tokens of a forward pass by length", "tenth of the samples, shortest first", "tokens_per_forward_decile"),
    ("wasted tokens by length", "tenth of the samples, shortest first", "wasted_tokens_decile"),
)
_PARTS = 10


def draft_charts(records: Sequence[Mapping[str, Any]]) -> list[Markup | None]:
    """The charts; None for charts without values in any step."""
    over_steps = [(title, *(_PREFIX + name for name in names)) for title, *names in _OVER_STEPS]
    within = [line_chart(title, _profiles(records, name), across=across) for title, across, name in _WITHIN_STEPS]
    return [*metric_charts(records, over_steps, _PREFIX), *within]


def _profiles(records: Sequence[Mapping[str, Any]], name: str) -> list[Series]:
    """Curves of the first, the middle and the last step that have ``name``_1 and so on."""
    rows = []
    for record in records:
        timing = record.get("timing", {})
        values = [timing.get(f"speculation_{name}_{part}") for part in range(1, _PARTS + 1)]
        if any(value is not None for value in values):
            rows.append((record["iteration"], list(enumerate(values, 1))))
    chosen = sorted({0, len(rows) // 2, len(rows) - 1}) if rows else []
    return [Series(f"step {rows[i][0]}", rows[i][1], COLORS[n]) for n, i in enumerate(chosen)]
