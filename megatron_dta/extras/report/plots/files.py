"""Writes pictures atomically."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_dta.common.command_line import check_picture
from megatron_dta.core.common.files import replacing


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file; raises InputError if it cannot be written."""
    check_picture(path, "picture")
    FigureCanvasAgg(figure)
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:], dpi=140)
