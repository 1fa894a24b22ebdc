"""Runs the commands in ``tools/`` as a user does, and loads scripts as modules."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest

from conftest import REPOSITORY
from forked import run_python


def load_script(path: str | Path) -> ModuleType:
    """The module that a script is, without its ``__main__`` part."""
    path = REPOSITORY / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_tool(monkeypatch: pytest.MonkeyPatch, name: str, arguments: str) -> Any:
    """Run ``tools/NAME.py`` in this process, where a test can patch what it calls."""
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    return load_script(f"tools/{name}.py").main()


class Tool:
    """The command ``tools/NAME.py``, or a script in another folder."""

    def __init__(self, name: str, folder: str = "tools") -> None:
        self.path = str(REPOSITORY / folder / f"{name}.py")

    def __call__(self, *arguments: object, **environment: str) -> CompletedProcess[str]:
        return run_python([self.path, *arguments], env=os.environ | environment)

    def json(self, *arguments: object, **environment: str) -> dict:
        """The result of ``--json``; nothing is on stderr, unless another environment is what it warns of."""
        done = self(*arguments, "--json", **environment)
        assert done.returncode == 0, done.stderr
        assert environment or done.stderr == "", done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def assert_refused(self, *arguments: object, parts: tuple[str, ...]) -> None:
        """The arguments are refused with status 2 and one line that has all ``parts``."""
        done = self(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("error: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        for part in parts:
            assert part in done.stderr
