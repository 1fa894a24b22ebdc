"""How errors reach the user: one line for invalid input and unusable paths, a traceback for a bug."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError


def ending(main: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status of ``main`` and what it wrote on standard error."""
    with pytest.raises(SystemExit) as end:
        run_entry_point(main)
    return end.value.code, capsys.readouterr().err


def test_unusable_paths_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "x", tmp_path / ("n" * 300)):
        status, text = ending(path.read_text, capsys)
        assert (status, text.count("\n")) == (2, 1)
        assert text.startswith(f"error: {path}: cannot be used (")


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = ending(lambda: {}["http://me:pw@host"], capsys)
    assert status == 1
    assert text.startswith("Traceback")
    assert text.endswith("KeyError: 'http://***@host'\n")


def test_lines_hold_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise InputError("--rollout-server-url http://me:pw@host/?x: must be like http://HOST:PORT")

    assert "http://***@host/?x:" in ending(refuse, capsys)[1]
