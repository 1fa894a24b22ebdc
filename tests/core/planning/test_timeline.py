"""Timelines of pipelines as JSON and as Chrome traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.plan_accuracy import replay, stage_seconds
from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.planner import plan_pipeline
from megatron_dta.core.planning.pipeline.simulation import simulate
from megatron_dta.core.planning.pipeline.timeline import (
    TimelineEvent,
    read_timeline,
    timeline_events,
    timeline_span,
    timeline_utilisation,
    write_chrome_trace,
    write_timeline,
)

GOOD = {"stage": 0, "kind": "F", "segment": 1, "chunk": 0, "start": 0.0, "end": 1.0}


def simulated() -> tuple[list[TimelineEvent], float]:
    rng = seed_all(2)
    parents, lengths = np.minimum(np.arange(-1, 11), 2), rng.integers(1, 9, 12)
    costs = PipelineCosts(rng.random((6, 12)), rng.random((6, 12)))
    schedule = plan_pipeline(parents, lengths, costs, 3, 2)
    timeline = simulate(schedule, parents, costs)
    return timeline_events(schedule, timeline), timeline.utilisation


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_finds_a_plan_that_came_true(seed: int) -> None:
    """Events with the plan's times give the plan; later starts change nothing, longer ops do."""
    rng = seed_all(seed)
    parents, lengths = np.minimum(np.arange(-1, 11), 2), rng.integers(1, 9, 12)
    costs = PipelineCosts(rng.random((6, 12)), rng.random((6, 12)))
    schedule = plan_pipeline(parents, lengths, costs, 3, 2)
    timeline = simulate(schedule, parents, costs)
    events = timeline_events(schedule, timeline)
    late = [replace(event, start=7 * i + event.start, end=7 * i + event.end) for i, event in enumerate(events)]
    late += [TimelineEvent(1, "wait", 3, 0, 0.0, 5.0)]
    for found in (replay(schedule, parents, events), replay(schedule, parents, late)):
        assert found.makespan == pytest.approx(timeline.makespan, rel=1e-9)
        np.testing.assert_allclose(found.start[2], timeline.start[2], rtol=1e-9, atol=1e-9)
    busy, waited = stage_seconds(late, 3)
    np.testing.assert_allclose(busy, timeline.busy, rtol=1e-9)
    assert waited == [0.0, 5.0, 0.0]
    slow = [replace(event, end=event.end + 100.0 * (event.stage == 1)) for event in events]
    assert replay(schedule, parents, slow).makespan >= 100 * 2 * 2 * 12
    with pytest.raises(ValueError, match=r"was not measured"):
        replay(schedule, parents, events[1:])


def test_events_of_a_simulation_come_back(tmp_path: Path) -> None:
    events, utilisation = simulated()
    assert len(events) == 2 * 2 * 3 * 12
    assert {event.kind for event in events} == {"F", "B"}
    assert timeline_utilisation(events, 3) == pytest.approx(utilisation)
    write_timeline(tmp_path / "t.json", events)
    assert read_timeline(tmp_path / "t.json") == events
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    other = TimelineEvent(0, "wait", -1, 0, -1.0, timeline_span(events)[1])
    assert timeline_span([*events, other])[0] == -1.0
    assert timeline_utilisation([*events, other], 3) < utilisation
    write_timeline(tmp_path / "none.json", [])
    assert read_timeline(tmp_path / "none.json") == []
    assert (timeline_span([]), timeline_utilisation([], 3)) == ((0.0, 0.0), 1.0)


def test_chrome_trace(tmp_path: Path) -> None:
    events, _ = simulated()
    write_chrome_trace(tmp_path / "trace.json", [*events, TimelineEvent(2, "wait", -1, 0, 0.25, 0.5)], "a name")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [entry for entry in entries if entry["ph"] == "X"]
    assert len(complete) == len(events) + 1
    for entry, event in zip(complete, events, strict=False):
        assert (entry["tid"], entry["name"]) == (event.stage, f"{event.kind} {event.segment}")
        assert entry["args"] == {"segment": event.segment, "chunk": event.chunk}
        assert entry["ts"] == pytest.approx(event.start * 1e6)
        assert entry["ts"] + entry["dur"] == pytest.approx(event.end * 1e6)
    assert (complete[-1]["name"], complete[-1]["ts"], complete[-1]["dur"]) == ("wait", 0.25e6, 0.25e6)
    names = [entry["args"]["name"] for entry in entries if entry["ph"] == "M"]
    assert names == ["a name", "stage 0", "stage 1", "stage 2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not a JSON file"),
        ("{}", "one JSON array"),
        ([1], "event 0: must be an object with stage, kind"),
        ([GOOD, {**GOOD, "more": 1}], "event 1: must be an object"),
        ([{**GOOD, "stage": True}], "event 0: stage must be a whole number, not True"),
        ([{**GOOD, "segment": 1.5}], "segment must be a whole number"),
        ([{**GOOD, "end": "1"}], "end must be a number, not '1'"),
        ([{**GOOD, "start": float("nan")}], "start must be a number"),
        ([{**GOOD, "kind": 3}], "kind must be a string"),
        ([{**GOOD, "end": -1.0}], "ends before it starts"),
        ([{**GOOD, "stage": -1}], "negative stage"),
    ],
)
def test_bad_files(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=message) as caught:
        read_timeline(path)
    assert "t.json" in str(caught.value)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for write in (write_timeline, write_chrome_trace):
        with pytest.raises(InputError, match="cannot be written"):
            write(tmp_path / "none" / "t.json", [])
    with pytest.raises(InputError, match="cannot be read"):
        read_timeline(tmp_path / "t.json")


@pytest.mark.parametrize("content", [b"{", b"[" * 200_000, b"\xff"], ids=["cut", "deep", "bytes"])
def test_files_that_hold_no_json_are_told_alike(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"file\.json: is not a JSON file"):
        read_timeline(path)
    with pytest.raises(InputError, match=r"nothing\.json: cannot be read: No such file"):
        read_timeline(tmp_path / "nothing.json")
