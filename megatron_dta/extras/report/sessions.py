"""Shows the sessions of agents as trees of calls: each call below the one whose answer it continues, with its turns.

A call that continues no earlier answer begins a branch: a retry, a sub-agent, or a history that was changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.report.text import number, visible

# Longer texts of a call are cut in the middle.
_MOST_CHARACTERS = 4000


@dataclass(frozen=True)
class SavedSession:
    """A session: its calls (depth, facts, context, output) in depth-first order, and what is filtered and sorted by."""

    group_id: str
    title: str
    calls: list[tuple[int, str, str, str]]
    data: dict[str, Any]


def session_from(batch: int, where: str, row: Any) -> SavedSession:
    """The session of a row of a file; ``InputError`` names the file and the row."""
    try:
        for index, call in enumerate(row["calls"]):
            if call["parent"] is not None and not 0 <= call["parent"] < index:
                raise ValueError(f"call {index + 1} continues call {call['parent']}, which is not before it")
        name, group = str(row["session"]), str(row["group_id"])
        title = f"batch {batch}, group {group}, session {name}: {_session_facts(row)}"
        return SavedSession(group, title, _calls(row["calls"]), _data(row))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: is not a session of agents ({type(error).__name__}: {error})") from None


def _session_facts(row: dict[str, Any]) -> str:
    calls, data = row["calls"], _data(row)
    branches = len(calls) - len({call["parent"] for call in calls} - {None})
    facts = [f"failed: {row['failure']}" if row["failure"] else f"reward {number(row['reward'])}"]
    facts.append(f"{len(calls)} calls in {branches} branches")
    facts.append(f"{data['computed']:,} tokens computed, {data['flat']:,} as a row for each call")
    return ", ".join(facts + data["tools"])


def _data(row: dict[str, Any]) -> dict[str, Any]:
    calls = row["calls"]
    computed = sum(len(call["context"]) + len(call["output"]) for call in calls)
    flat = sum(call["prompt_length"] + len(call["output"]) for call in calls)
    return {
        "failed": bool(row["failure"]),
        # The page's script reads JSON, which has no NaN.
        "reward": row["reward"] if math.isfinite(row["reward"] or 0.0) else None,
        "calls": len(calls),
        "computed": computed,
        "flat": flat,
        "reuse": flat / max(1, computed),
        "tools": sorted({visible(str(tool)) for call in calls for tool in call["tools"]}),
        "branches": sorted({str(call["branch"]) for call in calls} - {"None"}),
    }


def _calls(calls: list[dict[str, Any]]) -> list[tuple[int, str, str, str]]:
    """Calls without a fork stay at one depth."""
    below: dict[int | None, list[int]] = {}
    for index, call in enumerate(calls):
        below.setdefault(call["parent"], []).append(index)
    ordered = []
    # A stack instead of recursion: a session may be thousands of calls deep.
    stack = [(index, 0) for index in reversed(below.get(None, []))]
    while stack:
        index, depth = stack.pop()
        call, children = calls[index], below.get(index, [])
        texts = (_cut(str(call[name])) for name in ("context_text", "output_text"))
        ordered.append((min(depth, 12), _call_facts(index, call), *texts))
        stack += [(child, depth + (len(children) > 1)) for child in reversed(children)]
    return ordered


def _call_facts(index: int, call: dict[str, Any]) -> str:
    start = "from the start" if call["parent"] is None else f"continues {call['parent'] + 1}"
    if call["branch"] is not None:
        start += f", a branch ({call['branch']})"
    facts = [f"call {index + 1}, {start}, prompt {call['prompt_length']:,}, {len(call['context']):,} of them new"]
    facts.append(f"{call['finish']}, {call['seconds']:.2f} s")
    return ", ".join(facts + ([] if call["reward"] is None else [f"reward {number(call['reward'])}"]))


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
