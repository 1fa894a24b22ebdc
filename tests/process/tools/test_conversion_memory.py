"""Memory of a conversion does not grow with the model: twelve times the layers, the same resident memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked import Program
from tool_runs import load_script


class Started:
    """In place of ``subprocess.Popen``: the same program in a process forked off one that has imported the project."""

    def __init__(self, command: list[str], stdout: int) -> None:
        self._program = Program(command[1:])
        self.pid, self.returncode = self._program.pid, None

    def poll(self) -> int | None:
        if self._program.has_ended() and self.returncode is None:
            self.returncode = self._program.wait().returncode
        return self.returncode


def test_memory_does_not_grow_with_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_script("benchmarks/conversion.py")
    started = SimpleNamespace(Popen=Started, run=subprocess.run, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(benchmark, "subprocess", started)
    resident = {}
    for layers in (2, 24):
        flags = f"--folder {tmp_path} --divide-widths 16 --processes 1 --repeats 1 --tensor-model-parallel-size 2"
        monkeypatch.setattr(sys, "argv", ["benchmark", *flags.split()])
        resident[layers] = benchmark.benchmark(benchmark.parse_arguments(), tmp_path / str(layers), layers)
    few, many = resident[2], resident[24]
    assert few["byte_for_byte"]
    assert many["byte_for_byte"]
    more = many["bytes"] - few["bytes"]
    assert more > 140e6
    for direction in ("to_megatron", "to_hf"):
        assert many[direction]["resident_bytes"] - few[direction]["resident_bytes"] < more / 4
        assert many[direction]["resident_bytes"] > 50e6
