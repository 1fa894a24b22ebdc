"""Every figure in the tables of the pages of results is in the file that its row, or the text above, names."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from conftest import REPOSITORY

NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield value


def rows() -> Iterator[tuple[str, list[str], list[str]]]:
    """(row, figures, files) of every table row; the first cell says what the row is about."""
    lines = [x for n in ("results", "comparisons") for x in (REPOSITORY / "docs" / f"{n}.md").read_text().splitlines()]
    named: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        files = re.findall(r"`(\w[\w.-]*\.json)`", line)
        if not line.startswith("|"):
            named = [] if line.startswith("#") else files + named
        elif not line.startswith("|--") and not following.startswith("|--"):
            cells = " | ".join(line.split("|")[2:])
            yield line, NUMBER.findall(re.sub(r"`[^`]*`", "", cells)), files or named


def test_figures_are_those_of_the_files() -> None:
    values = {
        path.name: list(numbers_in(json.loads(path.read_text())))
        for path in (REPOSITORY / "benchmarks" / "results").glob("*.json")
    }
    figures = 0
    for row, texts, files in rows():
        assert files, f"no file is named for {row}"
        for text in texts:
            figure = Decimal(text.replace(",", ""))
            # Half a unit of the last digit.
            tolerance = 0.501 * 10.0 ** int(figure.as_tuple().exponent)
            known = (value for file in files for value in values[file])
            assert any(abs(value - float(figure)) <= tolerance for value in known), f"{text} is not in {files}: {row}"
            figures += 1
    assert figures > 200
