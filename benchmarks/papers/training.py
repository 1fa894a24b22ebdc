"""Trains in this process with the project's trainer, until the rollouts have cost a number of decoded tokens."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_dta.common.console import Console
from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.paths import decoded_tokens
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.data.step import StepSamples
from megatron_dta.training.loop import Trainer
from megatron_dta.training.monitor.metrics import read_metrics
from megatron_dta.wiring.setup import build_trainer

METRICS = "metrics.jsonl"
TASK = Path(__file__).resolve().parents[2] / "examples" / "scratchpad.py"


class UntilBudget:
    """A trainer's preparation of rollouts that counts their decoded tokens.

    The steps of the rollout batch that reaches the budget are the last ones of the run.
    """

    def __init__(self, trainer: Trainer, budget: int) -> None:
        self._trainer, self._inner, self._left = trainer, trainer.preparation, budget

    @property
    def pass_seconds(self) -> float:
        """See ``SamplePreparation``."""
        return self._inner.pass_seconds

    def prepare(self, rollouts: Sequence[Rollout]) -> list[StepSamples]:
        """See ``SamplePreparation``."""
        steps = self._inner.prepare(rollouts)
        self._left -= decoded_tokens(rollouts)
        if self._left <= 0:
            self._trainer.config.optimization.train_iters = self._trainer.progress.iteration + len(steps)
        return steps


def train(folder: Path, flags: list[str], budget: int | None = None, keep_weights: bool = True) -> None:
    """Train with ``flags``; metrics are in ``folder/metrics.jsonl`` and, with ``keep_weights``, a checkpoint in
    ``folder/checkpoint``.
    """
    saved = folder / "checkpoint"
    config = parse_arguments([*flags, "--save", str(saved)])
    trainer = build_trainer(config, Console())
    if budget is not None:
        trainer.preparation = UntilBudget(trainer, budget)
    try:
        trainer.run()
    finally:
        trainer.metrics.close()
    torch.distributed.destroy_process_group()
    if trainer.stopped_by is not None:
        shutil.rmtree(saved, ignore_errors=True)
        raise InputError(f"the run was stopped by {trainer.stopped_by}")
    shutil.move(saved / METRICS, folder / METRICS)
    if not keep_weights:
        shutil.rmtree(saved)


def make_data(folder: Path, flags: list[str]) -> None:
    """Write the prompts and solved problems of the task to ``folder``."""
    spec = importlib.util.spec_from_file_location("scratchpad", TASK)
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    sys.argv = [str(TASK), "--output", str(folder), *flags]
    task.main()


def training_progress(folder: Path, budget: int | None = None) -> str | None:
    """A line about a run that is under way."""
    records: list[dict[str, Any]] = read_metrics(folder / "checkpoint" / METRICS)
    if not records:
        return None
    step = f"step {records[-1]['iteration']}"
    if budget is None:
        return step
    spent = sum(record.get("decoded_tokens", 0.0) for record in records)
    reward = next((record["eval_reward"] for record in reversed(records) if "eval_reward" in record), None)
    judged = "" if reward is None else f", held-out reward {reward:.3f}"
    return f"{step}, {spent:,.0f} of {budget:,} decoded tokens{judged}"
