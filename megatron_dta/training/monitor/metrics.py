"""Writes each step's metrics to a JSONL file, TensorBoard and Weights & Biases.

The JSONL file holds one object per optimizer step, in order. Values that depend on the clock are under the key
``timing``, so the rest of two runs can be compared bit for bit. A run that continues from a checkpoint truncates the
file to that step, so the file looks as if the run had never stopped. In TensorBoard, repeated steps hide the old ones.
Weights & Biases continues the same run, which ``wandb_run.json`` in the same folder names. It keeps its existing values
of repeated steps, which are the same.
"""

from __future__ import annotations

import importlib.util
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replace_text
from megatron_dta.training.config import LoggingConfig

TIMING = "timing"
WANDB_RUN = "wandb_run.json"
# All settings of a run by flag at its last start; checkpoints hold them in a form that only PyTorch can read.
SETTINGS = "settings.json"


class MetricsLog:
    """Writes every record to all outputs that the settings enable.

    Args:
        path: the JSONL file, or None to write none.
        iteration: the step after which the run continues, -1 for a new run. Later records in the file are dropped.
        config: all settings by flag, for Weights & Biases.
    """

    def __init__(
        self, path: Path | None, settings: LoggingConfig, iteration: int, config: dict[str, Any] | None = None
    ) -> None:
        self.path = path
        self._file = None
        if path is not None:
            cut_back(path, iteration)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._tensorboard = _open_tensorboard(settings, iteration)
        self._wandb = _open_wandb(settings, config, path, iteration)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record: ``iteration``, numbers by name, and ``timing``."""
        record = {name: _plain(value) for name, value in record.items()}
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        scalars = _scalars(record)
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, record["iteration"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=record["iteration"])

    def close(self) -> None:
        """Flush and close all outputs."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def check_loggers(settings: LoggingConfig) -> None:
    """Refuse loggers whose packages are not installed."""
    for flag, value, package in (
        ("--wandb-project", settings.wandb_project, "wandb"),
        ("--tensorboard-dir", settings.tensorboard_dir, "tensorboard"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            raise InputError(f"{flag} needs the package {package}: pip install {package}, or leave the flag out")


def write_settings(folder: str | Path, settings: dict[str, Any]) -> None:
    """Write ``settings.json`` into the run's folder, for users and for reports; only its owner may read it."""
    replace_text(Path(folder) / SETTINGS, json.dumps(settings, indent=1) + "\n", mode=0o600)


def cut_back(path: Path, iteration: int) -> None:
    """Keep the records of steps up to ``iteration``, and drop a last line that a kill truncated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [line for line, record in _read_lines(path) if record["iteration"] <= iteration]
    replace_text(path, "".join(kept))


def lost_records(path: Path, iteration: int) -> str | None:
    """Says which of the steps up to ``iteration`` have no record in the metrics file; None if all have."""
    recorded = {record["iteration"] for record in read_metrics(path)}
    lost = [step for step in range(1, iteration + 1) if step not in recorded]
    if not lost:
        return None
    first = f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} steps, the first is step {lost[0]}"
    return f"{path} has no record of {first}; reports and the last lines of the run leave them out"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order."""
    return [record for _, record in _read_lines(path)]


def _read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("iteration"), int) or not line.endswith("\n"):
                raise ValueError("not a record of metrics")
        except ValueError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}: row {number} is not a record of metrics ({error}); move the file away") from None
        records.append((line, record))
    return records


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null. The record's ``skipped`` explains such values."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """Flatten a record to numbers by name; those of ``timing`` are named ``timing/...``."""
    timing = {f"{TIMING}/{name}": value for name, value in record.get(TIMING, {}).items()}
    values = {name: value for name, value in record.items() if name not in ("iteration", TIMING)} | timing
    return {name: float(value) for name, value in values.items() if isinstance(value, bool | int | float)}


def _open_tensorboard(settings: LoggingConfig, iteration: int) -> Any:
    if settings.tensorboard_dir is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    # Hide events after the checkpoint, since their steps are repeated.
    return SummaryWriter(settings.tensorboard_dir, purge_step=iteration + 1)


def _open_wandb(settings: LoggingConfig, config: dict[str, Any] | None, path: Path | None, iteration: int) -> Any:
    """Start a run of Weights & Biases, or resume the run of the steps up to ``iteration``."""
    if settings.wandb_project is None:
        return None
    import wandb

    named = None if path is None else path.with_name(WANDB_RUN)
    known = {}
    if named is not None and named.is_file() and iteration >= 0:
        with suppress(ValueError, TypeError):
            known = dict(json.loads(named.read_text(encoding="utf-8")))
    again = {"id": known.get("id"), "resume": "allow"} if known.get("project") == settings.wandb_project else {}
    try:
        run = wandb.init(
            project=settings.wandb_project, name=None if path is None else path.parent.name, config=config, **again
        )
    except Exception as error:
        raise InputError(f"--wandb-project {settings.wandb_project}: {type(error).__name__}: {error}") from error
    if named is not None:
        replace_text(named, json.dumps({"project": settings.wandb_project, "id": run.id}) + "\n")
    return run
