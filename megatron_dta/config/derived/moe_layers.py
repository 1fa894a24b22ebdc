"""Parses Megatron's notations for the layers that have experts or linear attention, without calling ``eval``."""

from __future__ import annotations

import ast
from collections.abc import Callable

from megatron_dta.common.errors import InputError


def parse_moe_layer_freq(text: str, num_layers: int) -> list[bool]:
    """For each layer, whether it has experts.

    Args:
        text: "N" for every N-th layer starting with the first, or a list with 0 or 1 for each layer. Lists may be
            added and multiplied: "([0]*1+[1]*3)*2" is [0, 1, 1, 1, 0, 1, 1, 1].

    Raises:
        InputError: the text is neither, or the length of the list is not ``num_layers``.
    """
    entries = _entries(
        f"--moe-layer-freq {text}",
        text,
        "a number N for every N-th layer, or a list of 0 and 1 like [0]*1+[1]*3",
        lambda every: [layer % every == 0 for layer in range(num_layers)],
        num_layers,
    )
    if not any(entries):
        raise InputError(f"--moe-layer-freq {text}: no layer has experts; leave --num-experts out")
    return entries


def parse_linear_attention_freq(text: str, num_layers: int) -> list[bool]:
    """For each layer, whether it has linear attention.

    Args:
        text: "N" for attention in every N-th layer (the N-th, the 2 N-th, ...) and linear attention in the others, or a
            list of 1 (linear attention) and 0, as in ``parse_moe_layer_freq``.

    Raises:
        InputError: the text is neither, or the length of the list is not ``num_layers``.
    """
    flag = f"--linear-attention-freq {text}"
    entries = _entries(
        flag,
        text,
        "a number N for attention in every N-th layer, or a list of 0 and 1 like ([1]*3+[0])*2",
        lambda every: [(layer + 1) % every != 0 for layer in range(num_layers)],
        num_layers,
    )
    if not any(entries):
        raise InputError(f"{flag}: no layer has linear attention; leave --experimental-attention-variant out")
    return entries


def _entries(
    flag: str, text: str, forms: str, from_interval: Callable[[int], list[bool]], num_layers: int
) -> list[bool]:
    """The list that ``text`` writes out or, for a number, that ``from_interval`` makes of it."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, num_layers)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"{flag}: give {forms}") from None
    if isinstance(value, int):
        if value < 1:
            raise InputError(f"{flag}: must be at least 1")
        return from_interval(value)
    if len(value) != num_layers:
        raise InputError(f"{flag}: has {len(value)} entries for --num-layers {num_layers}")
    return [entry == 1 for entry in value]


def _value(node: ast.expr, num_layers: int) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_value(entry, num_layers) for entry in node.elts]
        if all(entry in (0, 1) for entry in entries):
            return entries
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, num_layers), _value(node.right, num_layers)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            entries, times = (left, right) if isinstance(left, list) else (right, left)
            if times * len(entries) <= 100 * num_layers:  # a short flag must not fill the memory
                return entries * times
    raise ValueError("neither a number nor a list of 0 and 1")
