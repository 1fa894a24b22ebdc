"""Draws the prefix tree of one prompt's rollouts as SVG, with tokens to the right and one row per leaf.

A bar is a run of tokens that the same rollouts share. Its colour is the mean advantage of its trained tokens, over all
rollouts through it: blue above 0, red below, white at 0, grey where nothing is trained (the prompt). Under a branching
point stands the mean reward of the rollouts below it, if the bar is long enough for it; at a leaf their reward and mean
advantage. A bar is as long as the square root of its tokens, so that prompts do not push the branches off the page; its
tooltip has the text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.report.markup import Markup, number, svg, tag
from megatron_dta.rollouts import Rollout
from megatron_dta.tree import PrefixTree, build_prefix_tree

WIDTH, ROW, LEFT, RIGHT = 1130, 24, 8, 320
BAR = 16
MOST_ROLLOUTS = 64
MOST_TOOLTIP = 600
CHARACTER = 6.4
UNTRAINED = "#d5d5d5"
GOOD, BAD = np.array([47, 111, 171]), np.array([190, 60, 50])


@dataclass(frozen=True)
class NodeFigures:
    """What is known of the rollouts through one node: how many, mean reward, mean advantage of its trained tokens."""

    rollouts: int
    reward: float | None
    advantage: float | None
    spread: tuple[float, float] | None


def node_figures(tree: PrefixTree, rollouts: Sequence[Rollout]) -> list[NodeFigures]:
    """For each node; rollouts without a reward do not count in its mean, and so for advantages."""
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
    """A figure of the rollouts of one prompt; of many only the first are drawn, and the caption says so."""
    drawn = list(rollouts[:MOST_ROLLOUTS])
    tree = build_prefix_tree([rollout.token_ids for rollout in drawn])
    figures = node_figures(tree, drawn)
    left, width, row = _layout(tree)
    largest = max((abs(f.advantage) for f in figures if f.advantage is not None), default=0.0) or 1.0
    lines, bars = [], []
    for node in range(tree.num_nodes):
        parent = int(tree.node_parent[node])
        y = (row[node] + 0.5) * ROW
        if parent >= 0:
            lines.append(_link(left[parent] + width[parent], (row[parent] + 0.5) * ROW, left[node], y))
        bars.append(_bar(tree, node, figures[node], left[node], width[node], y, largest, texts))
    height = max(1.0, max(row) + 1) * ROW + 4
    saved = sum(len(rollout) for rollout in drawn)
    cut = "" if len(drawn) == len(rollouts) else f" (the first {len(drawn)} of {len(rollouts)})"
    caption = (
        f"{title}: {len(drawn)} rollouts{cut} of {saved:,} tokens, {tree.num_tokens:,} unique: reuse "
        f"{saved / tree.num_tokens:.2f}"
    )
    picture = svg(
        WIDTH, height, lines, bars, title=caption, class_="tree", data_nodes=tree.num_nodes, data_rollouts=len(drawn)
    )
    return tag("figure", tag("figcaption", tag("b", caption)), picture, class_="wide")


def _layout(tree: PrefixTree) -> tuple[list[float], list[float], list[float]]:
    """Left end, width and row of each node."""
    lengths = np.sqrt(tree.node_lengths.astype(float))
    depth = np.zeros(tree.num_nodes)
    hops = tree.node_depth.astype(float)
    # Between a node and its children; a tree of many levels has less room for each.
    gap = min(14.0, 0.4 * (WIDTH - LEFT - RIGHT) / max(1.0, float(hops.max(initial=0))))
    for node in range(tree.num_nodes):
        parent = int(tree.node_parent[node])
        depth[node] = lengths[node] + (depth[parent] if parent >= 0 else 0.0)
    room = WIDTH - LEFT - RIGHT - gap * float(hops.max(initial=0))
    scale = room / float(depth.max())
    left = [LEFT + scale * float(depth[n] - lengths[n]) + gap * float(hops[n]) for n in range(tree.num_nodes)]
    width = [max(scale * float(length), 2.0) for length in lengths]
    row = np.zeros(tree.num_nodes)
    next_row = 0
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    ends = set(tree.sequence_node.tolist())
    for node in range(tree.num_nodes):
        if tree.node_parent[node] >= 0:
            children[int(tree.node_parent[node])].append(node)
    for node in range(tree.num_nodes):  # preorder
        # A rollout that ends inside another one has a row of its own, above it.
        if not children[node] or node in ends:
            row[node] = next_row
            next_row += 1
    for node in reversed(range(tree.num_nodes)):
        if children[node] and node not in ends:
            row[node] = (row[children[node][0]] + row[children[node][-1]]) / 2
    return left, width, row.tolist()


def _link(x1: float, y1: float, x2: float, y2: float) -> Markup:
    middle = (x1 + x2) / 2
    return tag(
        "path", d=f"M{x1:.1f},{y1:.1f}C{middle:.1f},{y1:.1f} {middle:.1f},{y2:.1f} {x2:.1f},{y2:.1f}", class_="link"
    )


def color_of(advantage: float | None, largest: float) -> str:
    """From red over white to blue; ``largest`` is the advantage of a full colour."""
    if advantage is None:
        return UNTRAINED
    end = GOOD if advantage > 0 else BAD
    share = min(abs(advantage) / largest, 1.0) * 0.85
    red, green, blue = (np.array([255, 255, 255]) * (1 - share) + end * share).round().astype(int).tolist()
    return f"#{red:02x}{green:02x}{blue:02x}"


def _bar(
    tree: PrefixTree,
    node: int,
    figures: NodeFigures,
    left: float,
    width: float,
    y: float,
    largest: float,
    texts: Mapping[int, str] | None,
) -> Markup:
    ids = tree.token_ids[tree.node_start[node] : tree.node_start[node + 1]].tolist()
    text = node_text(ids, texts)
    told = [f"{len(ids)} tokens, {figures.rollouts} rollouts"]
    if figures.reward is not None:
        told.append(f"mean reward {number(figures.reward)}")
    if figures.spread is not None:
        low, high = (number(value) for value in figures.spread)
        told.append(f"advantage {number(figures.advantage)}" + (f" ({low} to {high})" if low != high else ""))
    box = tag(
        "rect",
        tag("title", "; ".join(told) + "\n" + text[:MOST_TOOLTIP]),
        x=left,
        y=y - BAR / 2,
        width=width,
        height=BAR,
        rx=3,
        fill=color_of(figures.advantage, largest),
        class_="node",
    )
    share = abs(figures.advantage or 0.0) / largest
    label = None
    if shown := _fitting(text, int((width - 8) / CHARACTER)):
        inside = tag("text", shown, x=4, y=BAR / 2 + 4, class_="inside light" if share > 0.6 else "inside")
        # A picture of its own cuts what is wider than the bar: fonts differ.
        label = tag("svg", inside, x=left, y=y - BAR / 2, width=width, height=BAR)
    return tag("g", box, label, _side(tree, node, figures, left + width, width, y))


def _fitting(text: str, columns: int) -> str:
    """The text truncated to ``columns``, where wide characters take two; empty if there are very few columns."""
    taken = 0
    for index, character in enumerate(text):
        taken += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if taken > columns:
            # What is cut begins one column earlier, where the ellipsis is.
            return text[: max(0, index - 1)] + "…" if columns > 3 else ""
    return text


def _side(tree: PrefixTree, node: int, figures: NodeFigures, x: float, width: float, y: float) -> Markup | None:
    """Behind a leaf: how often it was sampled, reward, advantage. At a branching point: the mean reward below it."""
    is_end = bool((tree.sequence_node == node).any())
    is_leaf = int(tree.node_subtree_end[node]) == node + 1
    if is_leaf:
        parts = [f"{figures.rollouts} times"] if figures.rollouts > 1 else []
        if figures.reward is not None:
            parts.append(f"reward {number(figures.reward)}")
        if figures.advantage is not None:
            parts.append(f"advantage {figures.advantage:+.3g}")
        return tag("text", "  ".join(parts), x=x + 6, y=y + 4, class_="leaf")
    if figures.reward is None:
        return None
    label = f"⌀ {number(figures.reward)}"
    if CHARACTER * len(label) > width:
        # The label would overlap the previous bar; the tooltip shows it.
        return None
    return tag("text", label, x=x - 2, y=y + BAR / 2 + 9 if not is_end else y - BAR / 2 - 1, class_="branch")


def node_text(ids: Sequence[int], texts: Mapping[int, str] | None) -> str:
    """The tokens' text, or the ids themselves; line ends and blanks shown."""
    if texts is None:
        return " ".join(str(token) for token in ids)
    whole = "".join(texts.get(token, f"<{token}>") or f"<{token}>" for token in ids)
    return whole.replace("\n", "⏎").replace("\t", "⇥")
