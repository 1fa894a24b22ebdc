"""``option``: a dataclass field that is also a command-line flag.

Every setting of this project is a typed dataclass field; ``megatron_dta.arguments`` generates the command line from
them. So a setting has one definition, one default and one help text, in Python and on the command line.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

from megatron_dta.common.errors import InputError

REQUIRED = MISSING
NO_FLAG = ""


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field with the metadata of its command-line flag.

    Args:
        default: the value when the flag is absent; ``REQUIRED`` if the flag must be given.
        help: the text for ``--help``.
        choices: the accepted values; None accepts any value.
        flag: the name of the flag, if it is not the field's name with dashes; ``NO_FLAG`` for settings of the Python
            API only.
        minimum, maximum: inclusive bounds of a number, checked by ``config.checks``.
        above: exclusive lower bound of a number, checked by ``config.checks``.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "flag": flag,
        "command_line": flag != NO_FLAG,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
    }
    return field(default=default, metadata=metadata)


def flag_of(setting: Field) -> str:
    """The flag of a dataclass field made by ``option``, including its dashes."""
    return setting.metadata["flag"] or "--" + setting.name.replace("_", "-")


def refuse_unread(settings: Any, names: Collection[str], needed: str) -> None:
    """Raise ``InputError`` if one of these fields of ``settings`` is given, which are not read without ``needed``."""
    for setting in fields(settings):
        if setting.name in names and getattr(settings, setting.name) != setting.default:
            raise InputError(f"{flag_of(setting)} has no effect without {needed}; leave it out or add that")
