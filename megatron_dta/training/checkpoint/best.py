"""Selects the best checkpoint of a run by an evaluation metric (``--keep-best-checkpoint``).

A checkpoint is saved after every evaluation that improves on all earlier ones, regardless of ``--save-interval``, and
the best checkpoint is never pruned. ``SAVE/best_checkpoint.json`` names it, for users and for ``--load SAVE/iter_...``:

    {"checkpoint": "iter_0000120", "iteration": 120, "metric": "eval_reward", "value": 0.91}

Every checkpoint also records the best one so far. If a run is killed after it saved a checkpoint and before it wrote
this file, the continued run writes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replace_text
from megatron_dta.training.checkpoint.files import iteration_folder
from megatron_dta.training.config import CheckpointConfig

BEST = "best_checkpoint.json"


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint after ``iteration`` steps, whose evaluation gave ``value`` for ``metric``."""

    iteration: int
    metric: str
    value: float

    def write(self, folder: Path) -> None:
        """Write ``best_checkpoint.json`` into the run's folder."""
        named = {"checkpoint": iteration_folder(self.iteration), **asdict(self)}
        replace_text(folder / BEST, json.dumps(named) + "\n")


def better_checkpoint(
    settings: CheckpointConfig, best: BestCheckpoint | None, record: Mapping[str, Any]
) -> BestCheckpoint | None:
    """Return the best checkpoint after an evaluation: the evaluated step if it is better, otherwise ``best``.

    The weights before the first step are not saved, so they are never the best. A value that is not finite is never
    better.

    Args:
        record: metrics of the evaluated step.

    Raises:
        InputError: the evaluation does not report the metric.
    """
    metric = settings.keep_best_checkpoint
    if metric is None:
        return best
    if metric not in record:
        names = ", ".join(sorted(name for name in record if name.startswith("eval_")))
        raise InputError(f"--keep-best-checkpoint {metric}: the evaluation gives {names}; name one of these")
    value, iteration = float(record[metric]), int(record["iteration"])
    if not math.isfinite(value) or iteration < 1:
        return best
    # After a change of the metric, the earlier best value no longer applies.
    if best is not None and best.metric == metric:
        better = value < best.value if lower_is_better(settings) else value > best.value
        if not better:
            return best
    return BestCheckpoint(iteration, metric, value)


def lower_is_better(settings: CheckpointConfig) -> bool:
    """Whether lower values are better: those of losses."""
    return (settings.keep_best_checkpoint or "").endswith("loss")
