"""What command lines have in common: one line for a bad one, limits of flags, results as JSON on the last line."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

from megatron_dta.errors import InputError, one_line


class CommandLineParser(argparse.ArgumentParser):
    """Takes flags by their whole names only and shows its description as it stands; errors are ``InputError``."""

    def __init__(self, description: str | None = None, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage text."""
        raise InputError(f"{one_line(message)} (--help lists the flags)")


def check_at_least(arguments: argparse.Namespace, least: float, *names: str) -> None:
    """Refuse a flag, by the name of its attribute, that is given (not None) and not a finite number >= ``least``."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def check_output(path: Path | None, flag: str) -> None:
    """Refuse a file whose folder does not exist, before there are results that could not be written."""
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if path is not None and path.is_dir():
        raise InputError(f"{flag} {path}: is a folder; name a file")


def json_text(values: Any, indent: int | None = None) -> str:
    """``values`` as JSON, which has no NaN and no infinity: they become null."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def print_json(values: Any) -> None:
    """The result for programs: one line, the last of standard output."""
    sys.stdout.flush()
    print(json_text(values), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
