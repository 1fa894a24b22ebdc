"""Cases and helpers that tests of conversion refused share."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from conftest import REPOSITORY


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tool(monkeypatch: pytest.MonkeyPatch, name: str, arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    load_tool(name).main()
