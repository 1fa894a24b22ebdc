"""Collects a benchmark's results and writes them to a file after each one, so that a crash loses nothing."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_dta.common.command_line import json_text


def measured_on(what: str, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The head of a result file: hardware, versions, date, command, commit and settings."""
    return {
        "what": what,
        "hardware": _hardware(device),
        "software": _versions(),
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "settings": settings,
    }


class Report:
    """The results so far; every new row is printed and written to ``output``."""

    def __init__(self, what: str, settings: dict[str, Any], device: torch.device, output: Path | None) -> None:
        self.output = output
        self.results = {**measured_on(what, settings, device), "rows": []}

    def add(self, row: dict[str, Any]) -> None:
        self.results["rows"].append(row)
        rates = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
        names = " ".join(str(v) for v in row.values() if isinstance(v, str))
        print(f"{names}  {rates}", flush=True)
        self.write()

    def write(self) -> None:
        if self.output is not None:
            temporary = self.output.with_name(self.output.name + ".tmp")
            temporary.write_text(json_text(self.results, indent=1) + "\n")
            temporary.replace(self.output)

    def attempt(self, names: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Add the row that ``measure`` returns, or its error if it raises; returns the row or None."""
        try:
            row = {**names, **measure()}
        except Exception as error:  # compilers and libraries raise many types
            self.add({**names, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
            return None
        self.add(row)
        return row


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "triton", "transformer-engine", "verl"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"
