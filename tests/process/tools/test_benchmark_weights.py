"""The benchmark of weight updates: a server in another process has the trainer's bytes."""

from __future__ import annotations

import json
from pathlib import Path

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
