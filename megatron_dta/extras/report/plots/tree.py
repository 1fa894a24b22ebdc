"""Draws the prefix trees of a segment plan, with tokens downwards and leaves side by side.

In the upper plot every node is a box as wide as its leaves and as long as its tokens, coloured by the segments that
hold them. It shows which nodes a segment combines and where it splits a path. The lower plot shows the tokens in flight
while each segment runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_dta.core.planning.segments.plan import SegmentPlan
from megatron_dta.core.tree import PrefixTree, tree_statistics
from megatron_dta.extras.report.plots.files import write_figure

# Segments in order along the rainbow, without its darkest ends: labels and neighbours stay readable.
COLOR_MAP = ListedColormap(colormaps["turbo"](np.linspace(0.08, 0.94, 256)))
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])  # of linear RGB (ITU-R BT.709); near enough to choose a text colour
MAX_OUTLINED_BOXES = 400  # Beyond it, outlines would hide the boxes.
MAX_OUTLINED_BARS = 150
MAX_LABELLED_BOXES = 40
MAX_MARKED_SEQUENCES = 64


def plot_tree(plan: SegmentPlan, path: str | Path, title: str = "") -> None:
    """Draw the plan's tree and its segments into ``path`` (PNG, PDF or SVG), which appears once it is complete.

    Raises InputError where the file cannot be written or has another suffix.
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3.2, 1])
    colors = _segment_colors(plan.num_segments)
    _draw_boxes(above, plan, colors)
    _draw_in_flight(below, plan, colors)
    statistics = tree_statistics(plan.tree)
    figure.suptitle(title or "Prefix tree and its segments", fontsize=13)
    above.set_title(
        f"{statistics.sequences:,} sequences of {statistics.tokens:,} tokens, {statistics.unique_tokens:,} unique: "
        f"each used {statistics.token_reuse:.2f} times on average",
        fontsize=10,
        loc="left",
    )
    bar = figure.colorbar(
        _color_scale(colors), ax=[above, below], pad=0.01, aspect=40, ticks=MaxNLocator(8, integer=True)
    )
    bar.set_label("segment, in the order of the forward passes")
    write_figure(figure, path)


def _segment_colors(count: int) -> np.ndarray:
    """RGBA [count, 4] along the colour map, every second segment lighter so that neighbours can be told apart."""
    colors = COLOR_MAP(np.linspace(0, 1, max(count, 1)))[:count]
    colors[1::2, :3] += 0.45 * (1 - colors[1::2, :3])
    return colors


def _color_scale(colors: np.ndarray) -> ScalarMappable:
    """Segment number, from 1, to the colour of its boxes: what the colour bar shows."""
    count = max(1, len(colors))
    return ScalarMappable(Normalize(0.5, count + 0.5), ListedColormap(colors if len(colors) else COLOR_MAP.colors[:1]))


def _draw_boxes(axes: Axes, plan: SegmentPlan, colors: np.ndarray) -> None:
    """The tree: one box for each part of a node that is in one segment."""
    tree = plan.tree
    left, right = leaf_spans(tree)
    node, segment, top, bottom = node_pieces(tree, plan.segment_start)
    corners = np.empty((len(node), 4, 2))
    corners[:, 0] = np.stack([left[node], top], axis=1)
    corners[:, 1] = np.stack([right[node], top], axis=1)
    corners[:, 2] = np.stack([right[node], bottom], axis=1)
    corners[:, 3] = np.stack([left[node], bottom], axis=1)
    outlined = len(node) <= MAX_OUTLINED_BOXES
    outline = {"edgecolors": "white", "linewidths": 0.6} if outlined else {"linewidths": 0, "antialiaseds": False}
    axes.add_collection(PolyCollection(corners, facecolors=colors[segment], **outline))
    if len(node) <= MAX_LABELLED_BOXES:
        for box, length in enumerate((bottom - top).tolist()):
            middle = (corners[box, 0] + corners[box, 2]) / 2
            dark = colors[segment[box], :3] @ LUMINANCE < 0.5
            axes.text(*middle, f"{length:,}", color="w" if dark else "k", ha="center", va="center", fontsize=8)
    if tree.num_sequences <= MAX_MARKED_SEQUENCES:
        last = np.unique(tree.sequence_node)
        end = tree.node_position[last] + tree.node_lengths[last]
        axes.plot((left[last] + right[last]) / 2, end, "k.", markersize=4, clip_on=False, label="end of a sequence")
        _legend_above(axes)
    axes.set_xlim(0, max(1, tree.num_leaves))
    axes.set_ylim(max(1, int(tree.sequence_lengths.max(initial=0))), 0)
    axes.set_xlabel("leaves of the tree")
    axes.set_ylabel("position in the sequence (tokens)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _thousands(axes)


def _draw_in_flight(axes: Axes, plan: SegmentPlan, colors: np.ndarray) -> None:
    """For each segment: its own tokens in its colour, on top of those of its ancestors."""
    lengths, in_flight = np.asarray(plan.lengths), np.asarray(plan.in_flight_tokens)
    edges = np.arange(plan.num_segments + 1) + 0.5
    axes.stairs(in_flight - lengths, edges, fill=True, color="0.82", label="ancestors")
    bars = np.empty((plan.num_segments, 4, 2))
    bars[:, :, 0] = np.stack([edges[:-1], edges[1:], edges[1:], edges[:-1]], axis=1)
    low, high = in_flight - lengths, in_flight
    bars[:, :, 1] = np.stack([low, low, high, high], axis=1)
    crowded = plan.num_segments > MAX_OUTLINED_BARS
    outline = {"linewidths": 0, "antialiaseds": False} if crowded else {"edgecolors": "white", "linewidths": 0.6}
    axes.add_collection(PolyCollection(bars, facecolors=colors, **outline))
    axes.axhline(
        plan.tree.sequence_lengths.max(initial=0), color="k", linewidth=0.8, linestyle=":", label="longest sequence"
    )
    axes.set_xlim(0.5, max(1, plan.num_segments) + 0.5)
    axes.set_ylim(0, max(1, plan.peak_in_flight_tokens) * 1.05)
    axes.set_title(
        f"{plan.num_segments:,} segments of at most {plan.segment_tokens:,} tokens, {plan.fill:.0%} full; "
        f"at most {plan.peak_in_flight_tokens:,} tokens and {plan.depth:,} segments in flight",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("segment")
    axes.set_ylabel("tokens in flight")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_above(axes)
    _thousands(axes)


def _legend_above(axes: Axes) -> None:
    """Right of the title, where it hides nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, borderaxespad=0.2)


def _thousands(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def leaf_spans(tree: PrefixTree) -> tuple[np.ndarray, np.ndarray]:
    """First leaf and one past the last leaf below each node, numbered in preorder: int64 [M] each."""
    is_leaf = tree.node_subtree_end == np.arange(1, tree.num_nodes + 1)
    leaves_before = np.concatenate([[0], np.cumsum(is_leaf)])
    return leaves_before[:-1], leaves_before[tree.node_subtree_end]


def node_pieces(tree: PrefixTree, segment_start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The largest runs of the stream that are in one node and one segment.

    Returns (node, segment, position of the first token, position after the last token), an int64 [pieces] each.
    """
    bounds = np.unique(np.concatenate([tree.node_start, segment_start]))
    start, end = bounds[:-1], bounds[1:]
    node = np.searchsorted(tree.node_start, start, side="right") - 1
    segment = np.searchsorted(segment_start, start, side="right") - 1
    top = tree.node_position[node] + start - tree.node_start[node]
    return node, segment, top, top + end - start
