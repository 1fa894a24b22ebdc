"""Runs ``tools/verify_checkpoint.py`` in the test's process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tool_runs import load_script


def verify(monkeypatch, capsys, hf: Path, megatron: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    command = ["verify", "--hf-checkpoint", str(hf), "--load", str(megatron), "--json", *flags]
    monkeypatch.setattr(sys, "argv", command)
    capsys.readouterr()
    status = load_script("tools/verify_checkpoint.py").main()
    out = capsys.readouterr().out
    return status, json.loads(out.strip().splitlines()[-1]), out
