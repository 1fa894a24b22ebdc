"""What a run prints is the text as it is, brackets and colons included, without credentials."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from megatron_dta.common.console import Console


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
