"""Reads typed values from a Hugging Face ``config.json``; a value of the wrong type is a one-line error that names it.

``config.json`` files are written by hand and by many versions of transformers. An absent key has transformers' default;
a present key must hold a valid value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError

CONFIG_FILE = "config.json"


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Read the ``config.json`` of a Hugging Face checkpoint folder. Nothing is executed or downloaded.

    Raises:
        InputError: the folder or the file is missing or unreadable, or the file is not a JSON object.
    """
    folder = Path(folder)
    file = folder / CONFIG_FILE
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; {_how_to_get(folder)}")
    if not file.is_file():
        raise InputError(f"{file}: no such file; give the folder of a Hugging Face checkpoint")
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object; raises ``InputError`` otherwise."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: must hold a JSON object and holds a {type(content).__name__}")
    return content


def _how_to_get(folder: Path) -> str:
    """Advice for a missing folder: a model name of the hub can be downloaded into a folder."""
    if len(folder.parts) == 2 and re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and not folder.parent.exists():
        return f"download the model with `hf download {folder} --local-dir {folder.name}` and give {folder.name}"
    return f"a Hugging Face checkpoint is a folder with {CONFIG_FILE}"


class HfValues:
    """Checked access to the values of a JSON object. ``null`` is an explicit value, which overrides the default.

    Args:
        values: the object.
        origin: name of the object in error messages, e.g. ``models/first/config.json``.
        defaults: values of absent keys. A key that is in neither object is missing.
    """

    def __init__(self, values: dict[str, Any], origin: str, defaults: dict[str, Any] | None = None) -> None:
        self._values, self._origin, self._defaults = values, origin, defaults or {}

    def error(self, message: str) -> InputError:
        """Create an error about this object."""
        return InputError(f"{self._origin}: {message}")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str) -> Any:
        """The value or its default; None for ``null`` and for missing keys."""
        return self._values.get(key, self._defaults.get(key))

    def integer(self, key: str, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        expected = f"a whole number of at least {minimum}"
        return self._checked(key, lambda value: type(value) is int and value >= minimum, expected)

    def number(self, key: str, above: float = 0.0) -> float:
        """A finite number above ``above``."""
        expected = f"a number above {above:g}"
        return float(self._checked(key, lambda v: type(v) in (int, float) and above < v < math.inf, expected))

    def flag(self, key: str) -> bool:
        """True or false."""
        return self._checked(key, lambda value: isinstance(value, bool), "true or false")

    def text(self, key: str) -> str:
        return self._checked(key, lambda value: isinstance(value, str), "a string")

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers, 0 and above."""
        return self._checked(key, _list_of(lambda v: type(v) is int and v >= 0), "a list of whole numbers")

    def texts(self, key: str) -> list[str]:
        return self._checked(key, _list_of(lambda value: isinstance(value, str)), "a list of strings")

    def table(self, key: str) -> HfValues | None:
        """An object inside this one, None if absent."""
        if self.get(key) is None:
            return None
        value = self._checked(key, lambda value: isinstance(value, dict), "an object")
        return HfValues(value, f"{self._origin}: {key}")

    def given(self) -> set[str]:
        """The keys that hold a value."""
        return {key for key in self._values if key in self}

    def values(self) -> list[Any]:
        return list(self._values.values())

    def as_written(self, key: str) -> str:
        """The value as an error message shows it."""
        if key in self._values:
            return f"{key} {_shown(self._values[key])}"
        return f"no {key}" + (f", which means {_shown(self._defaults[key])}" if key in self._defaults else "")

    def _checked(self, key: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.error(f"{key} is null" if key in self._values else f"{key} is missing")
        if not is_valid(value):
            raise self.error(f"{key} is {_shown(value)}; it must be {expected}")
        return value


def _list_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:60]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be shown"
