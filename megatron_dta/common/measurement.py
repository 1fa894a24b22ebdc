"""A benchmark's results with what they were measured on, in a file after each of them: a crash loses nothing."""

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
    """What every file of results begins with: hardware, versions, date, command, commit and settings."""
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
    """Results so far, in a file after each of them."""

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
        """Add what ``measure`` finds; one that cannot run leaves its reason, and the rest goes on."""
        try:
            row = {**names, **measure()}
        except Exception as error:  # whatever a compiler or a library raises
            self.add({**names, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
            return None
        self.add(row)
        return row


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions() -> str:
    import triton

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}"
    try:
        return f"{versions}, Transformer Engine {metadata.version('transformer-engine')}"
    except metadata.PackageNotFoundError:
        return versions


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"
