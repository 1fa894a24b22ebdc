"""``option``: a dataclass field that is also a command-line flag.

Every setting of this project is a typed dataclass field; ``training.arguments`` generates the command line from
them. So a setting has one definition, one default and one help text, in Python and on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, field
from typing import Any

REQUIRED = MISSING
NO_FLAG = ""
CONFIG_JSON = "config.json"
BOUNDS = ("minimum", "maximum", "above")


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
    needs: str | tuple[str, ...] = (),
    **bounds: float,
) -> Any:
    """A dataclass field with the metadata of its command-line flag.

    Args:
        default: the value when the flag is absent; ``REQUIRED`` if the flag must be given.
        help: the text for ``--help``.
        choices: the accepted values; None accepts any value.
        flag: the name of the flag, if it is not the field's name with dashes; ``NO_FLAG`` for settings of the Python
            API only, ``CONFIG_JSON`` for those that otherwise come from the config.json of a checkpoint.
        needs: without which other settings this one is not read, see ``config.checks.needs``.
        bounds: ``minimum`` and ``maximum`` of a number, and ``above``, which excludes it; ``config.checks`` holds them.
    """
    if not bounds.keys() <= set(BOUNDS):
        raise TypeError(f"bounds are {', '.join(BOUNDS)}, not {', '.join(bounds)}")
    metadata = {
        "help": help,
        "choices": choices,
        "flag": flag,
        "command_line": flag not in (NO_FLAG, CONFIG_JSON),
        **dict.fromkeys(BOUNDS),
        **bounds,
        "needs": (needs,) if isinstance(needs, str) else needs,
    }
    return field(default=default, metadata=metadata)


def flag_of(setting: Field) -> str:
    """The flag of a dataclass field made by ``option``, including its dashes."""
    flag = setting.metadata["flag"]
    return "--" + setting.name.replace("_", "-") if flag in (None, NO_FLAG, CONFIG_JSON) else flag
