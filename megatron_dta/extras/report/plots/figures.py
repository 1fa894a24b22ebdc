"""What all figures share: the style, boxes, and how they are written, to a file or as SVG into a page."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from megatron_dta.common.command_line import check_picture
from megatron_dta.core.common.files import replacing

COLORS = ("#2f6fab", "#d9822b", "#4c9a4c", "#9a5fb5", "#b5483a", "#5f8f8f", "#8a7a3a", "#7a7a7a")
STYLE = {
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelcolor": "#444444",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "grid.color": "#e8e8e8",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    # The same data give the same file.
    "svg.hashsalt": "megatron_dta",
}
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])  # of linear RGB (ITU-R BT.709); near enough to choose a text colour
MOST_OUTLINED = 400  # Beyond it, outlines would hide the boxes.


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure to a .png, .pdf or .svg, which appears once it is complete.

    Raises InputError where the file cannot be written or has another suffix.
    """
    check_picture(path, "picture")
    with rc_context(STYLE), replacing(Path(path)) as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:], dpi=140)


def svg_text(figure: Figure) -> str:
    """Return a figure as an SVG element."""
    text = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def add_boxes(axes: Axes, horizontal: np.ndarray, vertical: np.ndarray, colors: np.ndarray) -> None:
    """Draw boxes with the edges ``horizontal`` [boxes, 2] (left, right) and ``vertical`` [boxes, 2]."""
    corners = np.stack([horizontal[:, [0, 1, 1, 0]], vertical[:, [0, 0, 1, 1]]], axis=2)
    is_outlined = len(corners) <= MOST_OUTLINED
    outline = {"edgecolors": "white", "linewidths": 0.5} if is_outlined else {"linewidths": 0, "antialiaseds": False}
    axes.add_collection(PolyCollection(corners, facecolors=colors, **outline))


def label_box(axes: Axes, x: float, y: float, text: str, color: np.ndarray) -> None:
    """Write into the centre of a box of this colour."""
    text_color = "w" if color[:3] @ LUMINANCE < 0.55 else "k"
    axes.text(x, y, text, color=text_color, ha="center", va="center", fontsize=8)


def legend_above(axes: Axes, **arguments: object) -> None:
    """Put the legend to the right of the title, where it hides nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=8, borderaxespad=0.2, **arguments)
