"""Shows the sessions of agents as trees of calls: each call below the one whose answer it continues, with its turns.

A call that continues no earlier answer begins a branch: a retry, a sub-agent, or a history that was changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.report.text import number

# Longer texts of a call are cut in the middle.
_MOST_CHARACTERS = 4000


@dataclass(frozen=True)
class SavedCall:
    """One call: ``parent`` is the index of the call that it continues; ``context`` is what is new in its prompt."""

    parent: int | None
    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    context: str
    output: str
    finish: str
    reward: float | None
    seconds: float


@dataclass(frozen=True)
class SavedSession:
    """One session of rollout batch ``batch``."""

    batch: int
    name: str
    group_id: str
    reward: float | None
    failure: str | None
    calls: list[SavedCall]


def session_from(batch: int, where: str, row: object) -> SavedSession:
    """The session of a row of a file; ``InputError`` names the file and the row."""
    try:
        calls = [
            SavedCall(
                call["parent"],
                int(call["prompt_length"]),
                len(call["context"]),
                len(call["output"]),
                str(call["context_text"]),
                str(call["output_text"]),
                str(call["finish"]),
                call["reward"],
                float(call["seconds"]),
            )
            for call in row["calls"]
        ]
        for index, call in enumerate(calls):
            if call.parent is not None and not 0 <= call.parent < index:
                raise ValueError(f"call {index + 1} continues call {call.parent}, which is not before it")
        return SavedSession(batch, str(row["session"]), str(row["group_id"]), row["reward"], row["failure"], calls)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: is not a session of agents ({type(error).__name__}: {error})") from None


def session_title(session: SavedSession) -> str:
    rows = sum(call.prompt_tokens + call.output_tokens for call in session.calls)
    branches = len(session.calls) - len({call.parent for call in session.calls} - {None})
    facts = [
        f"failed: {session.failure}" if session.failure else f"reward {number(session.reward)}",
        f"{len(session.calls)} calls in {branches} branches",
        f"{sum(call.output_tokens for call in session.calls):,} tokens sampled, {rows:,} as rows",
    ]
    return f"batch {session.batch}, group {session.group_id}, session {session.name}: {', '.join(facts)}"


def session_calls(session: SavedSession) -> list[tuple[int, str, str, str]]:
    """The calls in depth-first order: (depth, facts, context, output). Calls without a fork stay at one depth."""
    below: dict[int | None, list[int]] = {}
    for index, call in enumerate(session.calls):
        below.setdefault(call.parent, []).append(index)
    calls = []
    # A stack instead of recursion: a session may be thousands of calls deep.
    stack = [(index, 0) for index in reversed(below.get(None, []))]
    while stack:
        index, depth = stack.pop()
        call, children = session.calls[index], below.get(index, [])
        calls.append((min(depth, 12), _facts(index, call), _cut(call.context), _cut(call.output)))
        stack += [(child, depth + (len(children) > 1)) for child in reversed(children)]
    return calls


def _facts(index: int, call: SavedCall) -> str:
    facts = [f"call {index + 1}", "a new branch" if call.parent is None else f"continues {call.parent + 1}"]
    facts += [f"prompt {call.prompt_tokens:,}, {call.new_tokens:,} of them new", f"{call.finish}, {call.seconds:.2f} s"]
    return ", ".join(facts + ([] if call.reward is None else [f"reward {number(call.reward)}"]))


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
