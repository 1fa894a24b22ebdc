"""Memory of a conversion does not grow with the model: seven times the layers, the same memory."""

import subprocess
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
    started = SimpleNamespace(Popen=Started, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(benchmark, "subprocess", started)
    few, many = (benchmark.benchmark(tmp_path / str(layers), layers, 16) for layers in (2, 14))
    assert few["byte_for_byte"]
    assert many["byte_for_byte"]
    more = many["bytes"] - few["bytes"]
    assert more > 75e6
    for direction in ("to_megatron", "to_hf"):
        assert many[direction]["allocated_bytes"] - few[direction]["allocated_bytes"] < more / 4
        assert many[direction]["allocated_bytes"] > 50e6
