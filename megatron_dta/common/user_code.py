"""Loads functions and classes of users, given as ``FILE.py:NAME``."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError, one_line


def load_from_file(where: str, path: str, name: str) -> Callable[..., Any]:
    """Run the file and return what it calls ``name``.

    Args:
        where: the flag and its value, with which messages begin.

    Raises:
        InputError: the file does not exist or does not run, or it has no callable of that name.
    """
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise InputError(f"{where}: must be FILE.py:NAME of a file that exists")
    module_spec = importlib.util.spec_from_file_location(f"megatron_dta_user_{file.stem}", file)
    assert module_spec is not None  # the suffix is .py
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{where}: the file does not run: {describe_error(error)}") from error
    value = getattr(module, name, None)
    if not callable(value):
        raise InputError(f"{where}: {path} has no function or class {name}")
    return value


def describe_error(error: BaseException) -> str:
    """Type, message and the innermost place of the error, on one line."""
    try:
        message = str(error)
    except Exception:  # the user's own class may do anything
        message = "no message"
    frames = traceback.extract_tb(error.__traceback__)
    position = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and frames and frames[-1].filename.startswith("<frozen"):
        position = ""  # the importer; the message of a file that cannot be compiled names the line itself
    return one_line(f"{type(error).__name__}: {message}{position}")
