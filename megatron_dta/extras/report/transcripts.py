"""Shows rollouts as searchable transcripts with roles, turns, marked trained tokens and rewards.

Roles come from the special tokens that chat templates write in front of them (``<|im_start|>user``); text that only
looks like one does not count. Without them the parts that are trained are the model's turns, the text before the
first is the prompt, and the text between them was added by the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.core.rollouts import Rollout
from megatron_dta.extras.report.markup import Markup, number, tag
from megatron_dta.extras.report.run_files import SavedStep, TextRun

# Special tokens after which a role is named up to the end of the line or the next special token.
_ROLE_FOLLOWS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>")
# Special tokens that name a role themselves.
_ROLES = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<\uff5cUser\uff5c>": "user",
    "<\uff5cAssistant\uff5c>": "assistant",
    "[INST]": "user",
    "[/INST]": "assistant",
}
LONGEST_ROLE = 40
# Characters of all transcripts of a page; a browser searches them without delay.
MOST_CHARACTERS = 20_000_000


@dataclass
class Turn:
    """What one role says: pieces of text, each trained or not, and whether it is a special token."""

    role: str
    pieces: list[tuple[str, bool, bool]] = field(default_factory=list)


def turns_of(rollout: Rollout, runs: Sequence[TextRun]) -> list[Turn]:
    """The turns of a rollout whose text is ``runs``."""
    trained = [bool(rollout.loss_mask[end - 1]) for end in np.cumsum([count for count, _, _ in runs])]
    turns: list[Turn] = []
    has_roles = any(special and (text in _ROLE_FOLLOWS or text in _ROLES) for _, text, special in runs)
    for index, (_, text, special) in enumerate(runs):
        role = None
        if has_roles:
            if special and text in _ROLES:
                role = _ROLES[text]
            elif special and text in _ROLE_FOLLOWS:
                role = _named_role(runs[index + 1 :])
        elif not turns or trained[index] != trained[index - 1]:
            role = "model" if trained[index] else "environment" if turns else "prompt"
        if role is not None or not turns:
            turns.append(Turn(role or "prompt"))
        turns[-1].pieces.append((text, trained[index], special))
    return turns


def _named_role(following: Sequence[TextRun]) -> str:
    """The role that the text after a special token names."""
    if not following or following[0][2]:
        return "unnamed"
    name = following[0][1].split("\n", 1)[0].strip()
    return name[:LONGEST_ROLE] or "unnamed"


def runs_from_tokens(rollout: Rollout, texts: Mapping[int, str] | None) -> list[TextRun]:
    """Runs of a rollout of which only single tokens' texts are known, or only their ids."""
    changes = np.flatnonzero(np.diff(rollout.loss_mask.astype(np.int8))) + 1
    runs = []
    for part in np.split(rollout.token_ids, changes):
        if texts is None:
            text = " ".join(map(str, part.tolist())) + " "
        else:
            text = "".join(texts.get(token) or f"<{token}>" for token in part.tolist())
        runs.append((len(part), text, False))
    return runs


def transcripts(step: SavedStep, groups: Sequence[str], room: int) -> tuple[list[Markup], int]:
    """The transcripts of these groups, limited to ``room`` characters in total, and their number of characters."""
    found, used = [], 0
    numbers: dict[str, int] = {}
    for index, rollout in enumerate(step.rollouts):
        name = rollout.group_id
        if name not in groups:
            continue
        numbers[name] = numbers.get(name, 0) + 1
        runs = step.runs[index] if step.runs is not None else runs_from_tokens(rollout, step.texts)
        used += sum(len(text) for _, text, _ in runs)
        if used > room:
            break
        title = f"step {step.iteration}, group {name}, rollout {numbers[name]}: {_facts(rollout)}"
        turns = [_turn(turn) for turn in turns_of(rollout, runs)]
        found.append(tag("details", tag("summary", title), turns, class_="rollout"))
    return found, used


def _facts(rollout: Rollout) -> str:
    """Reward, advantage and sizes of a rollout."""
    mask = rollout.loss_mask
    facts = [] if rollout.reward is None else [f"reward {number(rollout.reward)}"]
    if rollout.segment_rewards is not None:
        facts.append("of parts " + " ".join(number(float(reward)) for reward in rollout.segment_rewards))
    if rollout.advantages is not None:
        low, high = float(rollout.advantages[mask].min()), float(rollout.advantages[mask].max())
        facts.append(f"advantage {low:+.3g}" + (f" to {high:+.3g}" if high != low else ""))
    facts.append(f"{len(rollout):,} tokens, {int(np.count_nonzero(mask)):,} trained")
    return ", ".join(facts)


def _turn(turn: Turn) -> Markup:
    pieces = [
        tag("span", text, class_=("trained " if trained else "") + ("special" if special else ""))
        if trained or special
        else text
        for text, trained, special in turn.pieces
    ]
    return tag("div", tag("b", turn.role), tag("div", pieces, class_="text"), class_="turn")
