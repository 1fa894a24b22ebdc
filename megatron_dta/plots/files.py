"""Writes pictures atomically."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_dta.common.command_line import check_picture
from megatron_dta.common.errors import InputError


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file; raises InputError if it cannot be written."""
    check_picture(path, "picture")
    path = Path(path)
    FigureCanvasAgg(figure)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".plot-", suffix=path.suffix, delete=False) as file:
            temporary = file.name
            figure.savefig(file, format=path.suffix[1:], dpi=140)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{path}: the picture cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
