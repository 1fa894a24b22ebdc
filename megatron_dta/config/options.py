"""``option``: a dataclass field that is also a command-line flag.

Every setting of this project is a typed dataclass field; ``megatron_dta.arguments`` generates the command line from
them. So a setting has one definition, one default and one help text, in Python and on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, field
from typing import Any

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
    needs: str | tuple[str, ...] = (),
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
        needs: without which other settings this one is not read, see ``config.checks.needs``.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "flag": flag,
        "command_line": flag != NO_FLAG,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "needs": (needs,) if isinstance(needs, str) else needs,
    }
    return field(default=default, metadata=metadata)


def flag_of(setting: Field) -> str:
    """The flag of a dataclass field made by ``option``, including its dashes."""
    return setting.metadata["flag"] or "--" + setting.name.replace("_", "-")
