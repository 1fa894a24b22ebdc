"""Draws the prefix tree of one prompt's rollouts as SVG, with tokens to the right and one row per leaf.

A bar is a run of tokens that the same rollouts share. Its colour is the mean advantage of its trained tokens, over all
rollouts through it: blue above 0, red below, white at 0, grey where nothing is trained (the prompt). Under a branching
point is the mean reward of the rollouts below it, if the bar is long enough for it; at a leaf their reward and mean
advantage. A bar is as long as the square root of its tokens, so that prompts do not push the branches off the page; its
tooltip has the text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_dta.core.rollouts import Rollout
from megatron_dta.core.tree import PrefixTree, build_prefix_tree
from megatron_dta.extras.report.markup import Markup, number, svg, tag

WIDTH, ROW, LEFT, RIGHT = 1130, 24, 8, 320
BAR = 16
MOST_ROLLOUTS = 64
MOST_TOOLTIP = 600
CHARACTER = 6.4
UNTRAINED = "#d5d5d5"
GOOD, BAD = np.array([47, 111, 171]), np.array([190, 60, 50])


@dataclass(frozen=True)
class NodeFigures:
    """Statistics of the rollouts through one node; None where no rollout has the value.

    Attributes:
        rollouts: their number.
        reward: their mean reward.
        advantage: mean advantage of the node's trained tokens.
        spread: smallest and largest of these advantages.
    """

    rollouts: int
    reward: float | None
    advantage: float | None
    spread: tuple[float, float] | None


class _Bar(NamedTuple):
    """Place of a node's bar in the picture: left end, width, and vertical centre."""

    left: float
    width: float
    y: float


def node_figures(tree: PrefixTree, rollouts: Sequence[Rollout]) -> list[NodeFigures]:
    """Statistics of each node; rollouts without a reward or without advantages do not count in that mean."""
    through: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for index, node in enumerate(tree.sequence_node.tolist()):
        while node >= 0:
            through[node].append(index)
            node = int(tree.node_parent[node])
    figures = []
    for node, members in enumerate(through):
        first = int(tree.node_position[node])
        span = slice(first, first + int(tree.node_lengths[node]))
        rewards = [rollouts[i].reward for i in members if rollouts[i].reward is not None]
        trained = [
            rollouts[i].advantages[span][rollouts[i].loss_mask[span]]
            for i in members
            if rollouts[i].advantages is not None
        ]
        values = np.concatenate(trained) if trained else np.zeros(0)
        figures.append(
            NodeFigures(
                len(members),
                float(np.mean(rewards)) if rewards else None,
                float(values.mean()) if values.size else None,
                (float(values.min()), float(values.max())) if values.size else None,
            )
        )
    return figures


def tree_picture(title: str, rollouts: Sequence[Rollout], texts: Mapping[int, str] | None) -> Markup:
    """Return a figure of the rollouts of one prompt. Only the first 64 are drawn, and the caption says so."""
    drawn = list(rollouts[:MOST_ROLLOUTS])
    tree = build_prefix_tree([rollout.token_ids for rollout in drawn])
    figures = node_figures(tree, drawn)
    bars = _layout(tree)
    largest = max((abs(f.advantage) for f in figures if f.advantage is not None), default=0.0) or 1.0
    lines, nodes = [], []
    for node, bar in enumerate(bars):
        parent = int(tree.node_parent[node])
        if parent >= 0:
            lines.append(_link(bars[parent], bar))
        ids = tree.token_ids[tree.node_start[node] : tree.node_start[node + 1]].tolist()
        box = _box(bar, figures[node], ids, node_text(ids, texts), largest)
        nodes.append(tag("g", *box, _label(tree, node, figures[node], bar)))
    height = max(1.0, max(bar.y for bar in bars) / ROW + 0.5) * ROW + 4
    saved = sum(len(rollout) for rollout in drawn)
    cut = "" if len(drawn) == len(rollouts) else f" (the first {len(drawn)} of {len(rollouts)})"
    caption = (
        f"{title}: {len(drawn)} rollouts{cut} of {saved:,} tokens, {tree.num_tokens:,} unique: reuse "
        f"{saved / tree.num_tokens:.2f}"
    )
    picture = svg(
        WIDTH, height, lines, nodes, title=caption, class_="tree", data_nodes=tree.num_nodes, data_rollouts=len(drawn)
    )
    return tag("figure", tag("figcaption", tag("b", caption)), picture, class_="wide")


def _layout(tree: PrefixTree) -> list[_Bar]:
    """Place the bar of each node."""
    lengths = np.sqrt(tree.node_lengths.astype(float))
    depth = lengths.copy()
    for node, parent in enumerate(tree.node_parent.tolist()):
        if parent >= 0:
            depth[node] += depth[parent]
    hops = tree.node_depth.astype(float)
    # Between a node and its children; a tree of many levels has less room for each.
    gap = min(14.0, 0.4 * (WIDTH - LEFT - RIGHT) / max(1.0, float(hops.max(initial=0))))
    room = WIDTH - LEFT - RIGHT - gap * float(hops.max(initial=0))
    scale = room / float(depth.max())
    left = LEFT + scale * (depth - lengths) + gap * hops
    width = np.maximum(scale * lengths, 2.0)
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    ends = set(tree.sequence_node.tolist())
    for node in range(tree.num_nodes):
        if tree.node_parent[node] >= 0:
            children[int(tree.node_parent[node])].append(node)
    # A rollout that ends inside another one has a row of its own, above it.
    row = np.cumsum([not below or node in ends for node, below in enumerate(children)]) - 1.0
    for node in reversed(range(tree.num_nodes)):
        if children[node] and node not in ends:
            row[node] = (row[children[node][0]] + row[children[node][-1]]) / 2
    return [_Bar(*place) for place in zip(left.tolist(), width.tolist(), ((row + 0.5) * ROW).tolist(), strict=True)]


def _link(parent: _Bar, child: _Bar) -> Markup:
    start = parent.left + parent.width
    middle = (start + child.left) / 2
    curve = f"C{middle:.1f},{parent.y:.1f} {middle:.1f},{child.y:.1f} {child.left:.1f},{child.y:.1f}"
    return tag("path", d=f"M{start:.1f},{parent.y:.1f}{curve}", class_="link")


def color_of(advantage: float | None, largest: float) -> str:
    """Return a colour from red over white to blue; an advantage of ``largest`` has the full colour."""
    if advantage is None:
        return UNTRAINED
    end = GOOD if advantage > 0 else BAD
    share = min(abs(advantage) / largest, 1.0) * 0.85
    red, green, blue = (np.array([255, 255, 255]) * (1 - share) + end * share).round().astype(int).tolist()
    return f"#{red:02x}{green:02x}{blue:02x}"


def _box(
    bar: _Bar, figures: NodeFigures, ids: Sequence[int], text: str, largest: float
) -> tuple[Markup, Markup | None]:
    """Return the bar, with a tooltip, and the text inside it if it is wide enough for any."""
    tooltip = [f"{len(ids)} tokens, {figures.rollouts} rollouts"]
    if figures.reward is not None:
        tooltip.append(f"mean reward {number(figures.reward)}")
    if figures.spread is not None:
        low, high = (number(value) for value in figures.spread)
        tooltip.append(f"advantage {number(figures.advantage)}" + (f" ({low} to {high})" if low != high else ""))
    place = {"x": bar.left, "y": bar.y - BAR / 2, "width": bar.width, "height": BAR}
    title = tag("title", "; ".join(tooltip) + "\n" + text[:MOST_TOOLTIP])
    box = tag("rect", title, **place, rx=3, fill=color_of(figures.advantage, largest), class_="node")
    shown = _fitting(text, int((bar.width - 8) / CHARACTER))
    if not shown:
        return box, None
    is_dark = abs(figures.advantage or 0.0) / largest > 0.6
    inside = tag("text", shown, x=4, y=BAR / 2 + 4, class_="inside light" if is_dark else "inside")
    # Fonts differ in width; a nested picture clips text that is wider than the bar.
    return box, tag("svg", inside, **place)


def _fitting(text: str, columns: int) -> str:
    """Return the text truncated to ``columns``; wide characters take two. Empty if it must be cut to three or fewer."""
    taken = 0
    for index, character in enumerate(text):
        taken += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if taken > columns:
            # The ellipsis takes the last column.
            return text[: max(0, index - 1)] + "…" if columns > 3 else ""
    return text


def _label(tree: PrefixTree, node: int, figures: NodeFigures, bar: _Bar) -> Markup | None:
    """Return the label of a leaf (times sampled, reward, advantage) or of a branching point (mean reward below it)."""
    right = bar.left + bar.width
    if int(tree.node_subtree_end[node]) == node + 1:
        words = [f"{figures.rollouts} times"] if figures.rollouts > 1 else []
        if figures.reward is not None:
            words.append(f"reward {number(figures.reward)}")
        if figures.advantage is not None:
            words.append(f"advantage {figures.advantage:+.3g}")
        return tag("text", "  ".join(words), x=right + 6, y=bar.y + 4, class_="leaf")
    if figures.reward is None:
        return None
    label = f"⌀ {number(figures.reward)}"
    if CHARACTER * len(label) > bar.width:
        # The label would overlap the previous bar; the tooltip shows it.
        return None
    is_end = bool((tree.sequence_node == node).any())
    y = bar.y - BAR / 2 - 1 if is_end else bar.y + BAR / 2 + 9
    return tag("text", label, x=right - 2, y=y, class_="branch")


def node_text(ids: Sequence[int], texts: Mapping[int, str] | None) -> str:
    """Return the tokens' text with visible line ends and tabs, or the ids if there are no texts."""
    if texts is None:
        return " ".join(str(token) for token in ids)
    whole = "".join(texts.get(token, f"<{token}>") or f"<{token}>" for token in ids)
    return whole.replace("\n", "⏎").replace("\t", "⇥")
