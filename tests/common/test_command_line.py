"""Helpers of command lines: limits of flags, files that cannot be written, JSON without NaN."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_dta.common.command_line import CommandLineParser, check_at_least, check_output, json_text, print_json
from megatron_dta.core.common.errors import InputError


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
