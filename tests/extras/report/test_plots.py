"""Charts: the values and boxes that they show, and their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.timeline import TimelineEvent
from megatron_dta.core.planning.segments.plan import plan_segments
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.report.plots.curves import MOST_POINTS, Curve
from megatron_dta.extras.report.plots.figures import svg_text, write_figure
from megatron_dta.extras.report.plots.timeline import timeline_figure
from megatron_dta.extras.report.plots.tree import leaf_spans, node_pieces


def test_long_and_noisy_curves_are_means() -> None:
    rng = seed_all(5)
    count = 2 * MOST_POINTS + 7
    curve = Curve("x", np.arange(count), rng.standard_normal(count))
    curve.values[:4] = np.nan
    thin = curve.thinned()
    assert thin.name == "x (means of 3 steps)"
    assert len(thin.steps) == -(-count // 3)
    assert np.isnan(thin.values[0])
    assert thin.values[1] == pytest.approx(curve.values[4:6].mean())
    assert (thin.steps[-1], thin.values[-1]) == (count - 1, pytest.approx(curve.values[-3:].mean()))
    smooth = curve.smoothed(10)
    expected = [curve.values[max(4, i - 9) : i + 1].mean() for i in range(4, count)]
    np.testing.assert_allclose(smooth.values, expected)


def test_timelines(tmp_path: Path) -> None:
    events = [TimelineEvent(i % 3, "FB"[i % 2], i, i % 2, i + 5.0, i + 5.5) for i in range(12)]
    events.append(TimelineEvent(2, "wait", 3, 0, 4.0, 5.0))
    events.append(TimelineEvent(2, "send", -1, 0, 30.0, 31.0))
    figure = timeline_figure({"measured": events, "nothing": []}, 3, "a step $x")
    boxes = [path.get_extents() for path in figure.axes[0].collections[0].get_paths()]
    assert [(round(box.x0, 6), round(box.x1, 6)) for box in boxes[:2]] == [(1, 1.5), (2, 2.5)]
    assert len(boxes) == 13
    text = svg_text(figure)
    assert ">measured: 27 seconds, 7.4% of all stages" in text
    for label in ("a step $x", "stage 2", "forward", "backward", "send"):
        assert f">{label}</text>" in text
    assert "wait" not in text
    for name in ("t.png", "t.svg"):
        write_figure(figure, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(InputError, match=r"\.gif"):
        write_figure(figure, tmp_path / "t.gif")


def test_boxes_of_a_tree() -> None:
    """Each box is one node's tokens in one segment; together they are the stream; leaves are side by side."""
    rng = seed_all(5)
    sequences = [rng.integers(0, 3, int(rng.integers(1, 30))).astype(np.int32) for _ in range(25)]
    plan = plan_segments(build_prefix_tree(sequences), 7)
    tree = plan.tree
    node, segment, positions = node_pieces(tree, plan.segment_start)
    token = 0
    for box, (top, bottom) in enumerate(positions.tolist()):
        for position in range(top, bottom):
            assert tree.position[token] == position
            assert tree.node_start[node[box]] <= token < tree.node_start[node[box] + 1]
            assert plan.segment_start[segment[box]] <= token < plan.segment_start[segment[box] + 1]
            token += 1
    assert token == tree.num_tokens
    leaves = [m for m in range(tree.num_nodes) if m not in set(tree.node_parent.tolist())]
    for m, (left, right) in enumerate(leaf_spans(tree).tolist()):
        below = [index for index, leaf in enumerate(leaves) if m <= leaf < tree.node_subtree_end[m]]
        assert (left, right) == (below[0], below[-1] + 1)
