"""The benchmarks of servers: a server in another process has the trainer's bytes, and requests cost a core."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forked import run_python


def test_a_folder_on_a_cpu(tmp_path: Path) -> None:
    found = run_python(
        [
            "benchmarks/weight_transfer.py", "--ways", "folder", "--folder", str(tmp_path / "weights"),
            "--repeats", "1", "--output", str(tmp_path / "found.json"),
        ]
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["way"] == "folder"
    assert 0 < row["pause_s"] <= row["update_s"]
    assert not list((tmp_path / "weights").iterdir())


def test_shared_memory_needs_a_gpu() -> None:
    found = run_python(["benchmarks/weight_transfer.py", "--ways", "ipc"])
    assert found.returncode == 2
    assert "--ways ipc needs a GPU" in found.stderr


def test_requests_are_counted(tmp_path: Path) -> None:
    flags = "--servers 2 --requests-per-server 3 --response-tokens 40 --seconds 0.01 --responses 20 --processes 1"
    found = run_python(["benchmarks/server_requests.py", *flags.split(), "--output", str(tmp_path / "found.json")])
    assert found.returncode == 0, found.stderr
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["responses"] == 20
    assert row["core_s"] * row["responses_per_core_s"] == pytest.approx(20)
