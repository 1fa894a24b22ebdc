"""What users see: errors in one line, text as it is, and no credentials."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table

from megatron_dta.common.console import Console
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.common.secrets import redacted
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.arguments import parse_settings
from megatron_dta.training.config.train import settings_by_flag


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


@pytest.mark.parametrize("text", ["ends with [/ANS]", "a[b] c", "[red]x[/red]", "r[link=x]", ":smile: :x:", "\\[b]"])
@pytest.mark.parametrize("style", [None, "yellow"])
def test_text_is_printed_as_it_is(text: str, style: str | None) -> None:
    lines, table = io.StringIO(), Table(title=text)
    table.add_column(text)
    table.add_row(text)
    Console(file=lines, width=80).print(text, soft_wrap=True, style=style)
    assert lines.getvalue() == f"{text}\n"
    Console(file=lines, width=80).print(table)
    assert lines.getvalue().count(text) == 4


def test_credentials_are_hidden_in_lines_and_tables() -> None:
    output, table = io.StringIO(), Table("server")
    table.add_row("http://me:pw@host:1")
    console = Console(file=output, width=80)
    console.print("rollout server http://me:pw@host:1 is new", soft_wrap=True)
    console.print(table)
    assert "pw" not in output.getvalue()
    assert output.getvalue().count("http://***@host:1") == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host:8000/v1", "http://***@host:8000/v1"),
        ("HTTPS://me:p@w@host", "HTTPS://***@host"),
        ("http://token@host", "http://***@host"),
        ("http://me:p/w?@host:1: refused", "http://***@host:1: refused"),
        ("['http://a:b@x', 'http://c:d@y']", "['http://***@x', 'http://***@y']"),
        ("http://h/score?n=1&api_key=abc&x=2", "http://h/score?n=1&api_key=***&x=2"),
        ("http://h/score?token=abc", "http://h/score?token=***"),
        ("OPENAI_API_KEY=sk-1 run --n 2", "OPENAI_API_KEY=*** run --n 2"),
        ("run --api-key 'sk 1' --password=x", "run --api-key *** --password=***"),
    ],
)
def test_credentials_are_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/v1",
        "http://host:8000/a@b",
        "https://host/a@b and me@host",
        "--tokenizer-model runs/a@b --eos-id 2",
        "the key=value pairs of eos_token=<|im_end|>",
        "--rollout-max-response-len 16 --input-key prompt",
    ],
)
def test_other_text_is_left_alone(text: str) -> None:
    assert redacted(text) == text


def test_stored_settings_hold_no_credentials() -> None:
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --rollout-server-url http://a:b@x http://c:d@y"
    stored = settings_by_flag(parse_settings([*flags.split(), "--agent-command", "run --api-key sk-1"]))
    assert stored["--rollout-server-url"] == ["http://***@x", "http://***@y"]
    assert stored["--agent-command"] == "run --api-key ***"
