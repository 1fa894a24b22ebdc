"""Checks the file formats of pictures and writes pictures atomically."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_dta.common.errors import InputError

PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


def checked_path(path: str | Path) -> Path:
    """The path of a picture; raises InputError if its suffix is not a supported format."""
    path = Path(path)
    if path.suffix not in PICTURE_SUFFIXES:
        raise InputError(f"{path}: a picture is written as {', '.join(PICTURE_SUFFIXES)}, not '{path.suffix}'")
    return path


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a file; raises InputError if it cannot be written."""
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
