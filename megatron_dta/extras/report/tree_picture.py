"""The prefix tree of one prompt's rollouts as nested bars, which the page's template places.

A bar is a run of tokens that the same rollouts share. Its colour is the mean advantage of its trained tokens, over all
rollouts through it: blue above 0, red below, white at 0, grey where nothing is trained (the prompt). A bar is as long
as the square root of its tokens, so that prompts do not push the branches off the page; its tooltip has the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.tree import PrefixTree, build_prefix_tree
from megatron_dta.extras.report.text import number

# Pixels of the longest path, of which a part is between the bars.
WIDTH, GAP = 800, 14.0
CHARACTER = 6.4
MOST_ROLLOUTS = 64
MOST_INSIDE, MOST_TOOLTIP = 150, 600
UNTRAINED = "#d5d5d5"
GOOD, BAD = np.array([47, 111, 171]), np.array([190, 60, 50])


@dataclass
class Bar:
    """A node, or (without width) the end of rollouts inside another one.

    Attributes:
        mean: mean reward of the rollouts through a branching point.
        label: times sampled, reward and advantage of the rollouts that end here.
    """

    width: float = 0.0
    color: str = ""
    is_dark: bool = False
    text: str = ""
    tooltip: str = ""
    mean: str = ""
    label: str = ""
    below: list[Bar] = field(default_factory=list)


@dataclass
class TreePicture:
    """Picture of the rollouts of one prompt; ``gap`` is the distance between a bar and those below it."""

    title: str
    gap: float
    roots: list[Bar]


def _facts(rollouts: Sequence[Rollout], span: slice) -> tuple[str, float | None, str]:
    """Mean reward, mean advantage of the trained tokens of these positions, and both in words."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    parts = [r.advantages[span][r.loss_mask[span]] for r in rollouts if r.advantages is not None]
    reward = number(float(np.mean(rewards))) if rewards else ""
    advantage = float(np.concatenate(parts).mean()) if any(part.size for part in parts) else None
    words = [f"{len(rollouts)} times"] * (len(rollouts) > 1) + [f"reward {reward}"] * bool(rewards)
    return reward, advantage, "  ".join(words + ([] if advantage is None else [f"advantage {advantage:+.3g}"]))


def tree_picture(title: str, rollouts: Sequence[Rollout], texts: Mapping[int, str] | None) -> TreePicture:
    """Only the first 64 rollouts are drawn, and the title says so."""
    drawn = list(rollouts[:MOST_ROLLOUTS])
    tree = build_prefix_tree([rollout.token_ids for rollout in drawn])
    ending: list[list[Rollout]] = [[] for _ in range(tree.num_nodes)]
    for rollout, node in zip(drawn, tree.sequence_node.tolist(), strict=True):
        ending[node].append(rollout)
    # A tree of many levels has narrower gaps.
    hops = max(1, int(tree.node_depth.max(initial=0)))
    gap = min(GAP, 0.4 * WIDTH / hops)
    scale = (WIDTH - gap * hops) / _longest_path(tree)
    through = [
        [r for part in ending[node:end] for r in part] for node, end in enumerate(tree.node_subtree_end.tolist())
    ]
    spans = [slice(first, first + count) for first, count in zip(tree.node_position, tree.node_lengths, strict=True)]
    facts = [_facts(members, span) for members, span in zip(through, spans, strict=True)]
    largest = max((abs(advantage) for _, advantage, _ in facts if advantage is not None), default=0.0) or 1.0
    below: list[list[Bar]] = [[] for _ in range(tree.num_nodes + 1)]
    for node in reversed(range(tree.num_nodes)):
        ids = tree.token_ids[tree.node_start[node] : tree.node_start[node + 1]].tolist()
        width, text = max(scale * len(ids) ** 0.5, 2.0), node_text(ids[:MOST_TOOLTIP], texts)[:MOST_TOOLTIP]
        reward, advantage, words = facts[node]
        is_dark = abs(advantage or 0.0) / largest > 0.6
        bar = Bar(width, color_of(advantage, largest), is_dark, tooltip=f"{len(ids)} tokens  {words}\n{text}")
        bar.below, (*_, label) = below[node], _facts(ending[node], spans[node])
        # The tooltip has what a short bar has no space for.
        bar.text = text[:MOST_INSIDE] if width >= CHARACTER * 4 else ""
        if not bar.below:
            bar.label = label
        elif width >= CHARACTER * (len(reward) + 2):
            bar.mean = reward
        if bar.below and label:
            bar.below.insert(0, Bar(label=label))
        below[tree.node_parent[node]].insert(0, bar)
    tokens = sum(len(rollout) for rollout in drawn)
    cut = "" if len(drawn) == len(rollouts) else f" (the first {len(drawn)} of {len(rollouts)})"
    unique = f"{tree.num_tokens:,} unique: reuse {tokens / tree.num_tokens:.2f}"
    return TreePicture(f"{title}: {len(drawn)} rollouts{cut} of {tokens:,} tokens, {unique}", gap, below[-1])


def _longest_path(tree: PrefixTree) -> float:
    depths = np.sqrt(tree.node_lengths.astype(float))
    for node, parent in enumerate(tree.node_parent.tolist()):
        depths[node] += depths[parent] if parent >= 0 else 0.0
    return float(depths.max())


def color_of(advantage: float | None, largest: float) -> str:
    """Return a colour from red over white to blue; an advantage of ``largest`` has the full colour."""
    if advantage is None:
        return UNTRAINED
    share = min(abs(advantage) / largest, 1.0) * 0.85
    red, green, blue = (255 * (1 - share) + (GOOD if advantage > 0 else BAD) * share).round().astype(int).tolist()
    return f"#{red:02x}{green:02x}{blue:02x}"


def node_text(ids: Sequence[int], texts: Mapping[int, str] | None) -> str:
    """Return the tokens' text with visible line ends and tabs, or the ids if there are no texts."""
    if texts is None:
        return " ".join(map(str, ids))
    return "".join(texts.get(token) or f"<{token}>" for token in ids).replace("\n", "⏎").replace("\t", "⇥")
