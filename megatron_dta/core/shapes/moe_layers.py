"""Parses Megatron's notations for the layers that have experts or another mixer, without calling ``eval``."""

from __future__ import annotations

import ast
from collections.abc import Callable

from megatron_dta.core.common.errors import InputError


def parse_moe_layer_freq(text: str, num_layers: int) -> list[bool]:
    """For each layer, whether it has experts.

    Args:
        text: "N" for every N-th layer starting with the first, or a list with 0 or 1 for each layer. Lists may be
            added and multiplied: "([0]*1+[1]*3)*2" is [0, 1, 1, 1, 0, 1, 1, 1].

    Raises:
        InputError: the text is neither, or the length of the list is not ``num_layers``.
    """
    forms = "a number N for every N-th layer, or a list of 0 and 1 like [0]*1+[1]*3"
    none = "no layer has experts; leave --num-experts out"
    return _entries(f"--moe-layer-freq {text}", text, num_layers, lambda layer, every: layer % every == 0, forms, none)


def parse_mixer_layer_freq(text: str, num_layers: int) -> list[bool]:
    """For each layer, whether it has the mixer that is not attention.

    Args:
        text: "N" for attention in every N-th layer (the N-th, the 2 N-th, ...) and the mixer in the others, or a list
            of 1 (the mixer) and 0, as in ``parse_moe_layer_freq``.

    Raises:
        InputError: the text is neither, or the length of the list is not ``num_layers``.
    """
    forms = "a number N for attention in every N-th layer, or a list of 0 and 1 like ([1]*3+[0])*2"
    none = "no layer has the mixer; leave mixer out"
    flag_and_value = f"mixer_layer_freq {text}"
    return _entries(flag_and_value, text, num_layers, lambda layer, every: (layer + 1) % every != 0, forms, none)


def _entries(
    flag_and_value: str, text: str, num_layers: int, is_chosen: Callable[[int, int], bool], forms: str, none: str
) -> list[bool]:
    """The list that ``text`` writes out or, for a number, the layers for which ``is_chosen(layer, number)`` holds.

    Args:
        flag_and_value: for messages, like ``forms`` of a value and what it means that ``none`` is chosen.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, num_layers)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"{flag_and_value}: give {forms}") from None
    if isinstance(value, int):
        if value < 1:
            raise InputError(f"{flag_and_value}: must be at least 1")
        value = [int(is_chosen(layer, value)) for layer in range(num_layers)]
    if len(value) != num_layers:
        raise InputError(f"{flag_and_value}: has {len(value)} entries for --num-layers {num_layers}")
    if not any(value):
        raise InputError(f"{flag_and_value}: {none}")
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
