"""Which checkpoint of a run is the best by a metric of its evaluations (``--keep-best-checkpoint``).

After an evaluation that beats all before it a checkpoint is saved, whatever ``--save-interval`` says; old checkpoints
are deleted around it. ``SAVE/best_checkpoint.json`` names it, for people and for ``--load SAVE/iter_...``:

    {"checkpoint": "iter_0000120", "iteration": 120, "metric": "eval_reward", "value": 0.91}

The truth is in the checkpoints themselves: each knows the best one so far, so a run that was killed between a
checkpoint and this file writes it when it continues.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.config import CheckpointConfig
from megatron_dta.training.checkpoint.files import iteration_folder, replace_text

BEST = "best_checkpoint.json"


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint after ``iteration`` steps, whose evaluation gave ``value`` for ``metric``."""

    iteration: int
    metric: str
    value: float

    def state_dict(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        return asdict(self)

    def write(self, folder: Path) -> None:
        """Name it in the run's folder."""
        named = {"checkpoint": iteration_folder(self.iteration), **asdict(self)}
        replace_text(folder / BEST, json.dumps(named) + "\n")


def better_checkpoint(
    settings: CheckpointConfig, best: BestCheckpoint | None, record: Mapping[str, Any]
) -> BestCheckpoint | None:
    """What the record of an evaluated step makes the best checkpoint: a new one, or ``best`` still.

    The weights before the first step are no checkpoint. A value that is not finite is never better.

    Raises:
        InputError: the evaluation has no such metric.
    """
    metric = settings.keep_best_checkpoint
    if metric is None:
        return best
    if metric not in record:
        found = ", ".join(sorted(name for name in record if name.startswith("eval_")))
        raise InputError(f"--keep-best-checkpoint {metric}: the evaluation gives {found}; name one of these")
    value, iteration = float(record[metric]), int(record["iteration"])
    if not math.isfinite(value) or iteration < 1:
        return best
    # Another metric than the run had before starts anew.
    if best is not None and best.metric == metric:
        better = value < best.value if lower_is_better(settings) else value > best.value
        if not better:
            return best
    return BestCheckpoint(iteration, metric, value)


def lower_is_better(settings: CheckpointConfig) -> bool:
    """By ``--best-checkpoint-mode``, or by the metric's name."""
    if settings.best_checkpoint_mode is None:
        return (settings.keep_best_checkpoint or "").endswith("loss")
    return settings.best_checkpoint_mode == "min"
