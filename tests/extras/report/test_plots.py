"""Charts of runs: values, boxes and files; statistics and curves of speculation."""

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
from megatron_dta.sampling.speculation.report import SpeculationReport, drafting_benefit
from megatron_dta.training.monitor.metric_names import is_known


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


def made_up(rng: np.random.Generator, samples: int, forwards: int) -> SpeculationReport:
    report = SpeculationReport(draft_seconds=float(rng.random()), drafter_bytes=3 << 20, drafter_tokens=40_000)
    live = np.sort(rng.integers(1, samples + 1, forwards))[::-1]
    for count, seconds in zip(live.tolist(), rng.exponential(0.01, forwards).tolist(), strict=True):
        report.add_forward(count, count + 5, seconds)
    for _ in range(samples):
        length = int(rng.integers(1, 90))
        accepted = int(rng.integers(0, length))
        drafted = accepted + int(rng.integers(0, 50))
        report.add_samples([length], [length - accepted], [drafted], [accepted])
    return report


def test_figures_by_loops() -> None:
    report = made_up(seed_all(57), 57, 31)
    metrics = report.metrics()
    assert all(is_known(f"timing/{name}") for name in metrics)
    assert metrics["speculation_wasted_tokens"] == sum(report.drafted) - sum(report.accepted)
    assert metrics["speculation_makespan_seconds"] == pytest.approx(sum(report.seconds))
    longest = sorted(range(57), key=lambda i: (report.lengths[i], i))[-4:]
    gain = sum(report.lengths[i] for i in longest) / sum(report.steps[i] for i in longest)
    assert metrics["speculation_tokens_per_forward_longest_4"] == pytest.approx(gain)


def test_what_drafts_saved_in_a_sentence() -> None:
    """By the clock, over the rollout batches of a run."""
    report = SpeculationReport(saved_seconds=9.1)
    report.add_samples([20], [15], [9], [5])
    records = [{"iteration": 0, "timing": {}}]
    records += [{"rollout_batch_step": age, "timing": report.metrics()} for age in (0, 1, 0)]
    gave = "DAS: drafts gave 10 of 40 sampled tokens"
    assert drafting_benefit(records) == f"{gave}; sampling took about 18.2 s less with them."
    report.saved_seconds = -3.2
    assert drafting_benefit(records[:1] + 2 * [{"timing": report.metrics()}]) == (
        f"{gave}; sampling took about 6.4 s longer with them."
    )
    servers = {"timing": {"speculation_accepted_tokens": 30.0, "speculation_generated_tokens": 90.0}}
    assert drafting_benefit([servers]) == "DAS: drafts gave 30 of 90 sampled tokens."
    assert drafting_benefit([{"timing": {}}]) is None
