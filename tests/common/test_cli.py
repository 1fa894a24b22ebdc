"""The console command ``megatron-dta``: every command is listed and found, and typos get suggestions."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import megatron_dta
from conftest import REPOSITORY
from megatron_dta import cli
from megatron_dta.core.common.errors import InputError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | None:
    monkeypatch.setattr(sys, "argv", ["megatron-dta", *arguments])
    return cli.main()


def test_every_module_is_a_command_and_has_a_door():
    folder = Path(cli.__file__).parent / "commands"
    names, servers = (
        {path.stem.replace("_", "-") for path in commands.glob("*.py")} - {"--init--"}
        for commands in (folder, folder / "servers")
    )
    assert names | servers | {"train"} == set(cli.COMMANDS)
    assert servers == set(cli._SERVERS)
    # Servers came after the scripts, and have none.
    assert names == {path.stem.replace("_", "-") for path in (REPOSITORY / "tools").glob("*.py")}


def test_help_and_version(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    printed = capsys.readouterr().out
    assert all(f"  {name}" in printed for name in cli.COMMANDS)
    assert run(monkeypatch) == 2
    capsys.readouterr()
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"megatron-dta {megatron_dta.__version__}\n"


def test_a_misspelled_command_gets_the_nearest_name(monkeypatch):
    with pytest.raises(InputError, match="no command 'inspect-trees'; did you mean 'inspect-tree'"):
        run(monkeypatch, "inspect-trees")
    with pytest.raises(InputError, match="--help lists"):
        run(monkeypatch, "xyzzy")


def test_arguments_reach_the_command(monkeypatch, capsys, tmp_path):
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n')
    run(monkeypatch, "inspect-tree", str(file), "--json")
    assert '"unique_tokens": 3' in capsys.readouterr().out
    assert importlib.import_module("megatron_dta.commands.inspect_tree").main
