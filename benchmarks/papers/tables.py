"""Collects the rows of a paper's experiment, and writes them as JSON, as Markdown tables and as a plot.

Every file appears complete or not at all, and the JSON file after every row. A table has a title, the columns that
Markdown shows, and a note: what the paper reports and what differs here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.report import Report
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.extras.report.plots.figures import write_figure

COLORS = ("#3b75af", "#d9822b", "#5a9e4b", "#9a5fb5", "#b34a4a", "#6b6b6b")


@dataclass
class Table:
    """A table of the experiment.

    Attributes:
        columns: names of the rows' values that Markdown shows, in order, with their headings.
        note: a paragraph below the table.
    """

    title: str
    columns: dict[str, str]
    note: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table with its title and note."""
        lines = [f"### {self.title}", "", "| " + " | ".join(self.columns.values()) + " |"]
        lines.append("|" + "---|" * len(self.columns))
        lines += ["| " + " | ".join(shown(row.get(name)) for name in self.columns) + " |" for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])


class PaperReport:
    """The results of one paper's experiments: ``NAME.json``, ``NAME.md`` and plots in a folder.

    Args:
        name: of the files.
        folder: made if it does not exist.
        settings: recorded in the JSON file.
    """

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output-dir {folder}: {error.strerror}") from error
        self.name, self.folder, self.tables = name, folder, {}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._report = Report(name, settings, device, folder / f"{name}.json")

    def table(self, key: str, title: str, columns: dict[str, str], note: str = "") -> Table:
        """A new table; rows are added by its ``key``."""
        self.tables[key] = Table(title, columns, note)
        return self.tables[key]

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add a row to a table, print it and write the JSON file."""
        self.tables[key].rows.append(row)
        self._report.add({"table": key, **row})

    def rows(self, key: str) -> list[dict[str, Any]]:
        """The rows of a table; none if this run does not make it."""
        return self.tables[key].rows if key in self.tables else []

    def write_markdown(self) -> Path:
        """Write all tables; returns the file."""
        path = self.folder / f"{self.name}.md"
        with replacing(path) as temporary:
            temporary.write_text("\n".join(table.markdown() for table in self.tables.values()), encoding="utf-8")
        return path

    def plot(self, draw: Callable[[Sequence[Axes]], None], panels: int = 1, suffix: str = "") -> Path:
        """Write ``NAME[-SUFFIX].png`` with ``panels`` axes side by side, which ``draw`` fills."""
        figure = Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
        draw(list(figure.subplots(1, panels, squeeze=False).flat))
        path = self.folder / f"{self.name}{'-' if suffix else ''}{suffix}.png"
        write_figure(figure, path)
        return path


def shown(value: Any) -> str:
    """A value of a table's cell: three significant digits for fractions, separators for whole numbers."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def paper_parser(description: str, default_folder: str) -> argparse.ArgumentParser:
    """A parser with the flags that all papers have: --small, --smallest, --output-dir and --seeds."""
    parser = CommandLineParser(description)
    parser.add_argument("--small", action="store_true", help="tiny models and few sequences: minutes on two CPU cores")
    parser.add_argument("--smallest", action="store_true", help="smaller still, for tests: seconds")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/papers") / default_folder)
    parser.add_argument("--seeds", type=int, default=3, help="runs of everything that is random")
    return parser
