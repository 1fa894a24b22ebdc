"""Draws the prefix trees of a segment plan, with tokens downwards and leaves side by side.

In the upper plot every node is a box as wide as its leaves and as long as its tokens, coloured by the segments that
hold them. It shows which nodes a segment combines and where it splits a path. The lower plot shows the tokens in flight
while each segment runs.
"""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_dta.core.planning.segments.plan import SegmentPlan
from megatron_dta.core.tree import PrefixTree, tree_statistics
from megatron_dta.extras.report.plots.figures import STYLE, add_boxes, label_box, legend_above

# Segments in order along the rainbow, without its darkest ends: labels and neighbours stay readable.
COLOR_MAP = ListedColormap(colormaps["turbo"](np.linspace(0.08, 0.94, 256)))
MOST_LABELLED = 40
MOST_MARKED_SEQUENCES = 64


@rc_context(STYLE)
def tree_figure(plan: SegmentPlan, title: str = "Prefix tree and its segments") -> Figure:
    """Draw the plan's tree and its segments."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3.2, 1])
    colors = COLOR_MAP(np.linspace(0, 1, max(1, plan.num_segments)))
    # Every second segment is lighter, so that neighbours can be told apart.
    colors[1::2, :3] += 0.45 * (1 - colors[1::2, :3])
    _draw_tree(above, plan, colors)
    _draw_in_flight(below, plan, colors)
    figure.suptitle(title)
    scale = ScalarMappable(Normalize(0.5, len(colors) + 0.5), ListedColormap(colors))
    bar = figure.colorbar(scale, ax=[above, below], pad=0.01, aspect=40, ticks=MaxNLocator(8, integer=True))
    bar.set_label("segment, in the order of the forward passes")
    return figure


def _draw_tree(axes: Axes, plan: SegmentPlan, colors: np.ndarray) -> None:
    """One box for each part of a node that is in one segment."""
    tree = plan.tree
    leaves = leaf_spans(tree)
    node, segment, positions = node_pieces(tree, plan.segment_start)
    add_boxes(axes, leaves[node], positions, colors[segment])
    if len(node) <= MOST_LABELLED:
        for index, (first, end) in enumerate(positions.tolist()):
            label_box(axes, leaves[node[index]].mean(), (first + end) / 2, f"{end - first:,}", colors[segment[index]])
    if tree.num_sequences <= MOST_MARKED_SEQUENCES:
        last = np.unique(tree.sequence_node)
        end = tree.node_position[last] + tree.node_lengths[last]
        axes.plot(leaves[last].mean(1), end, "k.", markersize=4, clip_on=False, label="end of a sequence")
        legend_above(axes)
    statistics = tree_statistics(tree)
    axes.set(
        title=f"{statistics.sequences:,} sequences of {statistics.tokens:,} tokens, {statistics.unique_tokens:,} "
        f"unique: each used {statistics.token_reuse:.2f} times on average",
        xlim=(0, max(1, tree.num_leaves)),
        ylim=(max(1, int(tree.sequence_lengths.max(initial=0))), 0),
        xlabel="leaves of the tree",
        ylabel="position in the sequence (tokens)",
    )
    _thousands(axes)


def _draw_in_flight(axes: Axes, plan: SegmentPlan, colors: np.ndarray) -> None:
    """For each segment: its tokens in its colour, on top of those of its ancestors."""
    high = np.asarray(plan.in_flight_tokens)
    low = high - np.asarray(plan.lengths)
    edges = np.arange(plan.num_segments + 1) + 0.5
    axes.stairs(low, edges, fill=True, color="0.82", label="ancestors")
    add_boxes(axes, np.stack([edges[:-1], edges[1:]], 1), np.stack([low, high], 1), colors[: plan.num_segments])
    longest = plan.tree.sequence_lengths.max(initial=0)
    axes.axhline(longest, color="k", linewidth=0.8, linestyle=":", label="longest sequence")
    axes.set(
        title=f"{plan.num_segments:,} segments of at most {plan.segment_tokens:,} tokens, {plan.fill:.0%} full; "
        f"at most {plan.peak_in_flight_tokens:,} tokens and {plan.depth:,} segments in flight",
        xlim=(0.5, max(1, plan.num_segments) + 0.5),
        ylim=(0, max(1, plan.peak_in_flight_tokens) * 1.05),
        xlabel="segment",
        ylabel="tokens in flight",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_above(axes)
    _thousands(axes)


def _thousands(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")


def leaf_spans(tree: PrefixTree) -> np.ndarray:
    """First leaf and one past the last leaf below each node, numbered in preorder: int64 [M, 2]."""
    is_leaf = tree.node_subtree_end == np.arange(1, tree.num_nodes + 1)
    leaves_before = np.concatenate([[0], np.cumsum(is_leaf)])
    return np.stack([leaves_before[:-1], leaves_before[tree.node_subtree_end]], axis=1)


def node_pieces(tree: PrefixTree, segment_start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The largest runs of the stream that are in one node and one segment.

    Returns node and segment, int64 [pieces], and the positions of the first token and after the last, [pieces, 2].
    """
    bounds = np.unique(np.concatenate([tree.node_start, segment_start]))
    start, end = bounds[:-1], bounds[1:]
    node = np.searchsorted(tree.node_start, start, side="right") - 1
    segment = np.searchsorted(segment_start, start, side="right") - 1
    shift = tree.node_position[node] - tree.node_start[node]
    return node, segment, np.stack([start + shift, end + shift], axis=1)
