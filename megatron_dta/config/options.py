"""``option``: a dataclass field that is also a command-line flag.

Every setting of this project is a typed dataclass field; ``megatron_dta.arguments`` generates the command line from
them. So a setting has one definition, one default and one help text, in Python and on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, field
from typing import Any

REQUIRED = MISSING


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
    command_line: bool = True,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field with what the command line needs to know of it.

    Args:
        default: the value when the flag is absent; ``REQUIRED`` if there is none.
        help: one sentence for ``--help``.
        choices: the values accepted, all of them if None.
        flag: the flag's name where it is not the field's name with dashes.
        command_line: False for settings of the Python API only.
        minimum, maximum, above: bounds of a number, the last one excluded itself; checked by ``config.checks``.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "flag": flag,
        "command_line": command_line,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
    }
    return field(default=default, metadata=metadata)


def flag_of(setting: Field) -> str:
    """The flag of a dataclass field made by ``option``, dashes and all."""
    return setting.metadata["flag"] or "--" + setting.name.replace("_", "-")
