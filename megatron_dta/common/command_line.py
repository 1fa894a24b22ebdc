"""Shared parts of all command lines: one-line errors, checks of flags, and results as JSON on the last line."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_dta.core.common.errors import InputError, one_line, raise_all

PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


class CommandLineParser(argparse.ArgumentParser):
    """A parser without abbreviated flags that prints its description unformatted and raises ``InputError``."""

    def __init__(self, description: str | None = None, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **settings)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse as argparse does; the error for unknown flags has a line for each, with similar flags."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            named = [word for word in unknown if word.startswith("-") or "=" in word] or unknown
            lines = [self.meant(word) for word in named]
            lines[-1] += " (--help lists the flags)"
            raise_all(lines)
        return namespace

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse as argparse does; an unreadable argument file is a one-line error."""
        try:
            return super().parse_known_args(args, namespace)
        except UnicodeDecodeError as error:
            raise InputError(f"an argument file (@FILE) is not text ({error.reason})") from None
        except RecursionError:
            raise InputError("an argument file (@FILE) names itself, or one that names it") from None

    def error(self, message: str) -> NoReturn:
        """Raise a one-line error instead of printing argparse's usage text."""
        failure = sys.exc_info()[1]
        if isinstance(failure, OSError):
            raise InputError(f"argument file @{failure.filename}: cannot be read ({failure.strerror})")
        raise InputError(f"{one_line(message)} (--help lists the flags)")

    def meant(self, word: str) -> str:
        """The message for an unknown word, with similar flags."""
        flag = one_line(word.partition("=")[0])
        if not word.startswith("-"):
            return f"{one_line(word)}: belongs to no flag"
        near = list(dict.fromkeys(self._near(flag)))[:3]
        return f"{flag}: unknown flag" + (f"; did you mean {' or '.join(near)}?" if near else "")

    def _near(self, flag: str) -> Iterator[str]:
        """Flags with a similar name, with this prefix, or that share words with it; the best first."""
        known = {name: action for action in self._actions for name in action.option_strings if name.startswith("--")}
        name = "--" + flag.lstrip("-").replace("_", "-")
        yield from (other for other in known if other == name or other.startswith(f"{name}-"))
        yield from difflib.get_close_matches(name, known, n=3, cutoff=0.75)
        words = name.strip("-").replace("-", " ")
        yield from sorted((other for other in known if words in (known[other].help or "").lower()), key=len)


def add_sample_granularity(parser: argparse.ArgumentParser) -> None:
    """Add the flag that defines a sequence of stored rollouts."""
    parser.add_argument(
        "--sample-granularity",
        choices=("trajectory", "turn"),
        default="trajectory",
        help="one sequence per stored rollout, or per turn including all earlier turns (default: %(default)s)",
    )


def check_at_least(arguments: argparse.Namespace, least: float, *names: str) -> None:
    """Refuse flags (named by attribute) that are given (not None) but are not finite numbers >= ``least``."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def check_output(path: Path | None, flag: str) -> None:
    """Refuse an output file whose folder does not exist, before any results are computed."""
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {path.parent}; create it first")
    if path is not None and path.is_dir():
        raise InputError(f"{flag} {path}: is a folder; name a file")


def check_picture(path: str | Path | None, flag: str) -> None:
    """Refuse a picture that cannot be written as a file of its suffix, before any results are computed."""
    if path is None:
        return
    check_output(Path(path), flag)
    if Path(path).suffix not in PICTURE_SUFFIXES:
        raise InputError(f"{flag} {path}: a picture is written as {', '.join(PICTURE_SUFFIXES)}")


def json_text(values: Any, indent: int | None = None) -> str:
    """``values`` as JSON. NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def print_json(values: Any) -> None:
    """Print a machine-readable result as the last line of standard output."""
    sys.stdout.flush()
    print(json_text(values), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
