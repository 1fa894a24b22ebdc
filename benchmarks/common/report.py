"""Collects a benchmark's results and writes them to a file after each one, so that a crash loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_dta.common.command_line import json_text
from megatron_dta.common.measurement import measured_on
from megatron_dta.core.common.files import replacing


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
            with replacing(self.output) as temporary:
                temporary.write_text(json_text(self.results, indent=1) + "\n", encoding="utf-8")

    def attempt(self, names: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Add the row that ``measure`` returns, or its error if it raises; returns the row or None."""
        try:
            row = {**names, **measure()}
        except Exception as error:  # compilers and libraries raise many types
            self.add({**names, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
            return None
        self.add(row)
        return row
