"""Splits tensors that stack the matrices of all experts of a layer into the matrices, and back.

Published Qwen3.5 checkpoints with experts hold ``experts.gate_up_proj`` [experts, 2 * width, hidden] and
``experts.down_proj`` [experts, hidden, width]. In memory these are the matrices of the single experts, one after
another, under the names that other checkpoints give them.
"""

from __future__ import annotations

import re

_STACK = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<matrix>gate_up|down)_proj")
_MATRIX = re.compile(r"(?P<experts>.*\.mlp\.experts)\.\d+\.(?P<matrix>gate|up|down)_proj\.weight")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def matrices_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the consecutive matrices in a tensor; the tensor itself if it stacks none."""
    stack = _STACK.fullmatch(name)
    if stack is None or len(shape) != 3:
        return [(name, shape)]
    parts = _PARTS[stack["matrix"]]
    matrix = (shape[1] // len(parts), shape[2])
    return [(f"{stack['experts']}.{expert}.{part}_proj.weight", matrix) for expert in range(shape[0]) for part in parts]


def stack_of(name: str) -> str:
    """Name of the tensor that stacks the matrix ``name``; ``name`` itself if no tensor does."""
    matrix = _MATRIX.fullmatch(name)
    if matrix is None:
        return name
    return f"{matrix['experts']}.{'down' if matrix['matrix'] == 'down' else 'gate_up'}_proj"


def stacked_shape(matrices: list[tuple[int, ...]], name: str) -> tuple[int, ...]:
    """Shape of the tensor ``name`` that stacks ``matrices``."""
    stack = _STACK.fullmatch(name)
    if stack is None:
        return matrices[0]
    parts = len(_PARTS[stack["matrix"]])
    return (len(matrices) // parts, parts * matrices[0][0], matrices[0][1])
