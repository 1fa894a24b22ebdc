"""Cases and helpers that tests of verify checkpoint share."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from conftest import REPOSITORY


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def verify(monkeypatch, capsys, hf: Path, megatron: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    command = ["verify", "--hf-checkpoint", str(hf), "--load", str(megatron), "--json", *flags]
    monkeypatch.setattr(sys, "argv", command)
    capsys.readouterr()
    status = tool("verify_checkpoint").main()
    out = capsys.readouterr().out
    return status, json.loads(out.strip().splitlines()[-1]), out
