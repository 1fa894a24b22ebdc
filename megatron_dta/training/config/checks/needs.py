"""Rejects settings that are given although nothing would read them, given the others.

``option(..., needs=...)`` names what a setting needs: one or more conditions, all of which must hold. A condition is
``name`` (that setting is given, and not 0), ``name=a,b``, ``name!=a,b`` or ``name>1``; " or " joins alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron_dta.core.config.options import flag_of
from megatron_dta.training.config.train import TrainConfig, settings_of

_CONDITION = re.compile(r"(\w+)(?:(!?=|>)(.+))?")


def unread_settings(config: TrainConfig, left_out: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a line for each setting that differs from its default and is not read.

    Args:
        left_out: beginnings of the ``topic.name`` of settings that need nothing.
    """
    values = {setting.name: value for _, setting, value in settings_of(config)}
    flags = {setting.name: flag_of(setting) for _, setting, _ in settings_of(config)}
    for topic, setting, value in settings_of(config):
        if value == setting.default or f"{topic}.{setting.name}".startswith(left_out):
            continue
        unmet = [need for need in setting.metadata["needs"] if not _holds(need, values)]
        if unmet:
            needed = " or ".join(_in_words(condition, flags) for condition in unmet[0].split(" or "))
            yield f"{flags[setting.name]} has no effect without {needed}; leave it out or add that"


def _holds(need: str, values: dict[str, Any]) -> bool:
    for condition in need.split(" or "):
        name, relation, operand = parse_condition(condition)
        value = values[name]
        if relation == ">":
            holds = value > float(operand)
        elif relation:
            holds = (value in operand.split(",")) == (relation == "=")
        else:
            holds = bool(value)
        if holds:
            return True
    return False


def parse_condition(condition: str) -> tuple[str, str, str]:
    """The setting that a condition names, and relation and operand, which may be empty."""
    parts = _CONDITION.fullmatch(condition)
    if parts is None:
        raise ValueError(f"not a condition on a setting: {condition}")
    return parts[1], parts[2] or "", parts[3] or ""


def _in_words(condition: str, flags: dict[str, str]) -> str:
    name, relation, operand = parse_condition(condition)
    *first, last = operand.split(",")
    choices = f"{', '.join(first)} or {last}" if first else last
    words = {"": "", "=": f" {choices}", "!=": f" than {choices}", ">": f" above {operand}"}
    return ("another " if relation == "!=" else "") + flags[name] + words[relation]
