"""Metrics files: one record a step, cut back exactly, never NaN; TensorBoard, Weights & Biases and the plot."""

import json
import sys
import types
from pathlib import Path

import pytest

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.config import LoggingConfig
from megatron_dta.training.monitor.metrics import (
    MetricsLog,
    check_loggers,
    cut_back,
    lost_records,
    read_metrics,
    write_settings,
)


def record(iteration: int, **values: object) -> dict:
    return {
        "iteration": iteration,
        "loss": 0.1 * iteration,
        "skipped": False,
        **values,
        "timing": {"train_seconds": 1.0},
    }


def write(path: Path, iterations: range, after: int = -1) -> None:
    log = MetricsLog(path, LoggingConfig(), after)
    for iteration in iterations:
        log.write(record(iteration))
    log.close()


def test_a_continued_file_reads_as_if_never_stopped(tmp_path: Path) -> None:
    write(tmp_path / "straight.jsonl", range(6))
    path = tmp_path / "new" / "metrics.jsonl"
    write(path, range(5))
    with open(path, "a") as file:
        file.write('{"iteration": 5, "lo')
    write(path, range(3, 6), after=2)
    assert path.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    write(path, range(6))
    assert path.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    assert [row["iteration"] for row in read_metrics(path)] == list(range(6))


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("first\nsecond\n")
    with pytest.raises(InputError, match=r"notes.txt: row 1 is not a record of metrics .*; move the file away"):
        cut_back(path, 3)
    assert path.read_text() == "first\nsecond\n"
    path.write_text('{"iteration": 1}\n[2]\n{"iteration": 3}\n')
    with pytest.raises(InputError, match="row 2"):
        cut_back(path, 3)


def test_lost_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert "no record of 4 steps, the first is step 1;" in lost_records(path, 4)
    write(path, range(5))
    assert lost_records(path, 4) is None
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:2] + rows[3:]))
    assert "no record of step 2;" in lost_records(path, 4)
    path.write_text("".join(rows[:3]))
    assert "no record of 2 steps, the first is step 3;" in lost_records(path, 4)


def test_settings_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    write_settings(tmp_path, {"--lr": 1.0})
    assert (tmp_path / "settings.json").stat().st_mode & 0o777 == 0o600


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl", LoggingConfig(), -1)
    log.write(record(1, loss=float("nan"), grad_norm=float("inf"), skipped=True))
    log.close()
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["skipped"] is True


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    log = MetricsLog(None, LoggingConfig(tensorboard_dir=str(tmp_path)), 0)
    log.write(record(1))
    log.write(record(2, reward=None))
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "skipped", "timing/train_seconds"}
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("loss")] == [(1, 0.1), (2, 0.2)]


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()  # find_spec asks for it
    fake.init = lambda **arguments: (
        calls.append(arguments)
        or types.SimpleNamespace(
            log=lambda values, step: calls.append((step, values)),
            finish=lambda: calls.append("finish"),
            id=f"run{len(calls)}",
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = MetricsLog(None, LoggingConfig(wandb_project="p"), -1, {"--lr": 1.0})
    log.write(record(4))
    log.close()
    expected = {"loss": 0.4, "skipped": 0.0, "timing/train_seconds": 1.0}
    assert calls == [{"project": "p", "name": None, "config": {"--lr": 1.0}}, (4, expected), "finish"]
    # A resumed run continues the same wandb run; a new run, or one in another folder, gets a new one.
    path = tmp_path / "metrics.jsonl"
    for project, iteration, expected in (
        ("p", -1, {}),
        ("p", 0, {"id": "run1", "resume": "allow"}),
        ("p", 7, {"id": "run1", "resume": "allow"}),
        ("q", 7, {}),
        ("q", 9, {"id": "run1", "resume": "allow"}),
        ("q", -1, {}),
    ):
        calls.clear()
        MetricsLog(path, LoggingConfig(wandb_project=project), iteration, None).close()
        assert calls[0] == {"project": project, "name": tmp_path.name, "config": None, **expected}
    (tmp_path / "wandb_run.json").write_text("{")
    MetricsLog(path, LoggingConfig(wandb_project="q"), 3, None).close()
    fake.init = lambda **arguments: 1 / 0
    with pytest.raises(InputError, match="--wandb-project q: ZeroDivisionError"):
        MetricsLog(path, LoggingConfig(wandb_project="q"), 3, None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="--wandb-project needs the package wandb"):
        check_loggers(LoggingConfig(wandb_project="p"))
