"""The console command and helpers of command lines: commands, limits of flags, files, JSON without NaN."""

import importlib
import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import megatron_dta
from conftest import REPOSITORY
from megatron_dta import cli
from megatron_dta.common.command_line import CommandLineParser, check_at_least, check_output, json_text, print_json
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


def test_a_wrong_flag_is_one_line() -> None:
    parser = CommandLineParser("text")
    parser.add_argument("--number", type=int)
    with pytest.raises(
        InputError, match=r"--numbers: unknown flag; did you mean --number\? \(--help lists the flags\)"
    ):
        parser.parse_args(["--numbers", "3"])
    with pytest.raises(InputError, match="invalid int value: 'x'") as caught:
        parser.parse_args(["--number", "x"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -3, math.nan, math.inf, -math.inf])
def test_values_below_the_least_are_refused_by_flag(value: float) -> None:
    check_at_least(Namespace(max_length=None, other=1), 1, "max_length", "other")
    with pytest.raises(InputError, match="--max-length must be at least 1, not"):
        check_at_least(Namespace(max_length=value, other=1), 1, "other", "max_length")


def test_files_that_cannot_be_written_are_told_first(tmp_path: Path) -> None:
    check_output(None, "--output")
    check_output(tmp_path / "new.json", "--output")
    with pytest.raises(InputError, match=r"--output .*there is no folder"):
        check_output(tmp_path / "none" / "new.json", "--output")
    with pytest.raises(InputError, match=r"--output .*is a folder"):
        check_output(tmp_path, "--output")


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"a": math.nan, "b": [1.5, -math.inf, {"c": (math.inf, "text", None, True)}]}
    print_json(values)
    expected = {"a": None, "b": [1.5, None, {"c": [None, "text", None, True]}]}
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == expected
    assert json.loads(json_text(values, indent=1)) == expected
