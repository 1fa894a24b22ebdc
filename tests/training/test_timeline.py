"""Timelines of pipelines and their files."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.planner import plan_pipeline
from megatron_dta.core.planning.pipeline.simulation import simulate
from megatron_dta.core.planning.pipeline.timeline import (
    TimelineEvent,
    timeline_events,
    timeline_span,
    timeline_utilisation,
)
from megatron_dta.training.monitor.timeline_files import beside_plan, read_timelines, write_timelines

GOOD = {"stage": 0, "kind": "F", "segment": 1, "chunk": 0, "start": 0.0, "end": 1.0}


def simulated() -> tuple[list[TimelineEvent], float]:
    rng = seed_all(2)
    parents, lengths = np.minimum(np.arange(-1, 11), 2), rng.integers(1, 9, 12)
    costs = PipelineCosts(rng.random((6, 12)), rng.random((6, 12)))
    schedule = plan_pipeline(parents, lengths, costs, 3, 2)
    timeline = simulate(schedule, parents, costs)
    return timeline_events(schedule, timeline), timeline.utilisation


def test_events_of_a_simulation_come_back(tmp_path: Path) -> None:
    events, utilisation = simulated()
    assert len(events) == 2 * 2 * 3 * 12
    assert {event.kind for event in events} == {"F", "B"}
    assert timeline_utilisation(events, 3) == pytest.approx(utilisation)
    write_timelines(tmp_path / "t.json", {"simulated": events, "none": []})
    assert read_timelines(tmp_path / "t.json") == {"simulated": events, "none": []}
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    other = TimelineEvent(0, "wait", -1, 0, -1.0, timeline_span(events)[1])
    assert timeline_span([*events, other])[0] == -1.0
    assert timeline_utilisation([*events, other], 3) < utilisation
    assert (timeline_span([]), timeline_utilisation([], 3)) == ((0.0, 0.0), 1.0)


def test_a_trace_has_a_process_for_the_plan_and_the_execution(tmp_path: Path) -> None:
    events, _ = simulated()
    slow = [replace(event, start=3 * event.start + 1, end=3 * event.end + 1) for event in events]
    timelines = beside_plan([*slow, TimelineEvent(2, "wait", -1, 0, 0.25, 0.5)], events)
    assert timeline_span(timelines["planned"])[1] == pytest.approx(3 * timeline_span(events)[1])
    assert list(beside_plan(events, [])) == ["measured"]
    write_timelines(tmp_path / "trace.json", timelines)
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [entry for entry in entries if entry["ph"] == "X" and entry["pid"] == 1]
    assert len(complete) == len(events) + 1
    for entry, event in zip(complete, slow, strict=False):
        assert (entry["tid"], entry["name"]) == (event.stage, f"{event.kind} {event.segment}")
        assert entry["ts"] == pytest.approx(event.start * 1e6)
        assert entry["ts"] + entry["dur"] == pytest.approx(event.end * 1e6)
    assert (complete[-1]["name"], complete[-1]["ts"], complete[-1]["dur"]) == ("wait", 0.25e6, 0.25e6)
    names = [entry["args"]["name"] for entry in entries if entry["ph"] == "M"]
    stages = ["stage 0", "stage 1", "stage 2"]
    assert names == ["planned", *stages, "measured", *stages]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not a JSON file"),
        ("{}", "KeyError: 'traceEvents'"),
        ({**GOOD, "end": -1.0}, "ends before it starts"),
        ({**GOOD, "stage": -1}, "negative stage"),
    ],
)
def test_bad_files(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "t.json"
    entries = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "a"}}]
    entries.append({"name": "F", "ph": "X", "pid": 0, "args": content})
    path.write_text(content if isinstance(content, str) else json.dumps({"traceEvents": entries}))
    with pytest.raises(InputError, match=rf"t\.json: .*{message}"):
        read_timelines(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("none/t.json", "pipe"):
        with pytest.raises(InputError, match=f"{name}: cannot be written"):
            write_timelines(tmp_path / name, {})
    (tmp_path / "link").symlink_to(path)
    write_timelines(tmp_path / "link", {})
    assert read_timelines((tmp_path / "link").readlink()) == {}
    with pytest.raises(InputError, match="cannot be read"):
        read_timelines(tmp_path / "none.json")
