"""Describes what a measurement ran on, for the head of its result file."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def measured_on(what: str, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The head of a result file: hardware, versions, date, command, commit and settings."""
    return {
        "what": what,
        "hardware": _hardware(device),
        "software": _versions(),
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions() -> str:
    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", "triton", "transformer-engine", "verl"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "rev-parse", "--short", "HEAD"]
    run = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8", check=False)
    return run.stdout.strip() or "unknown"
