"""Shows rollouts as searchable transcripts with roles, turns, marked trained tokens and rewards.

Roles come from the special tokens that chat templates write in front of them (``<|im_start|>user``); text that only
looks like one does not count. Without them the parts that are trained are the model's turns, the text before the
first is the prompt, and the text between them was added by the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.report.run_files import SavedStep, TextRun
from megatron_dta.extras.report.text import number

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
    """What one role says: pieces (text, is trained, is a special token)."""

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


def runs_of_ids(rollout: Rollout) -> list[TextRun]:
    """The token ids of a rollout whose text is unknown, in runs of trained or untrained ones."""
    changes = np.flatnonzero(np.diff(rollout.loss_mask.astype(np.int8))) + 1
    return [
        (len(part), " ".join(map(str, part.tolist())) + " ", False) for part in np.split(rollout.token_ids, changes)
    ]


def transcripts(step: SavedStep, groups: Sequence[str], most: int) -> tuple[list[tuple[str, list[Turn]]], int]:
    """Titles and turns of the rollouts of these groups, at most ``most`` characters, and their number of characters."""
    shown, used = [], 0
    numbers: dict[str, int] = {}
    for index, rollout in enumerate(step.rollouts):
        name = rollout.group_id
        if name not in groups:
            continue
        numbers[name] = numbers.get(name, 0) + 1
        runs = step.runs[index] if step.runs is not None else runs_of_ids(rollout)
        used += sum(len(text) for _, text, _ in runs)
        if used > most:
            break
        title = f"step {step.iteration}, group {name}, rollout {numbers[name]}: {_facts(rollout)}"
        shown.append((title, turns_of(rollout, runs)))
    return shown, used


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
