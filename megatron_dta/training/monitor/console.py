"""Prints the progress of a run: a line per step and evaluation, warnings, and a final summary.

Step lines are at most ``WIDTH`` characters long. A longer line drops figures, the least important ones first. The
metrics file holds all figures.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_dta.common.console import Console
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.monitor.benefits import benefit_sentences
from megatron_dta.training.monitor.metrics import TIMING, read_metrics
from megatron_dta.training.monitor.seconds import seconds_sentence, start_sentence
from megatron_dta.training.monitor.start_clock import mark, start_seconds

WIDTH = 120
LEGEND = "length: mean trained tokens; ended: not cut; tied: groups of equal rewards; reuse: tokens / unique tokens"
# The remaining time is estimated from this number of recent steps.
RECENT_STEPS = 20

Record = Mapping[str, Any]


class RunConsole:
    """Prints the progress on rank 0. The ``console`` of every other rank is quiet.

    Args:
        metrics: the metrics file, or None if none is written.
    """

    def __init__(self, console: Console, config: TrainConfig, metrics: Path | None) -> None:
        self._console, self._metrics = console, metrics
        self._train_iters, self._interval = config.optimization.train_iters, config.logging.log_interval
        self._clock = StepClock()
        # Without a metrics file, the records are kept in memory for the final summary.
        self._kept: list[Record] = []
        self._without_signal, self._advised, self._started = 0, False, False

    def print(self, line: str) -> None:
        """Print a line without wrapping it, since it may contain long paths."""
        self._console.print(line, soft_wrap=True)

    def warn(self, line: str) -> None:
        self._console.print(line, style="yellow", soft_wrap=True)

    def report(self, record: Record) -> None:
        """Print a step's line if --log-interval includes the step, its evaluation, and any warnings."""
        iteration, last = record["iteration"], record["iteration"] == self._train_iters
        self._clock.tick(is_step=iteration > 0)
        if not self._started:
            mark("first step" if iteration else "evaluation")
            self._started = iteration > 0
            if self._started and record.get(TIMING):
                self.print(start_sentence(start_seconds(), record[TIMING]))
        if self._metrics is None and not self._console.quiet:
            self._kept.append(record)
        if record.get("skipped"):
            self.warn(
                f"step {iteration}: skipped, the weights are unchanged: the loss is {record['loss']}, "
                f"the gradient norm {record['grad_norm']}"
            )
        if record.get("ratio_bounded"):
            self.warn(
                f"step {iteration}: {100 * record['ratio_bounded']:.3g}% of the trained tokens have a recorded logprob "
                "more than 20 from the trainer's, so their ratios are bounded; check the sampler's logprobs, or give "
                "--old-logprobs recompute"
            )
        self._warn_without_signal(record)
        if iteration > 0 and (iteration % self._interval == 0 or last):
            self.print(step_line(record, self._train_iters, self._clock.seconds_per_step))
            if branches := branch_line(record):
                self.print(branches)
        evaluated = evaluation_line(record)
        if evaluated is not None:
            self.print(evaluated)

    def finish(self, iteration: int, stopped_by: str | None) -> None:
        """Print what the methods of the run saved, and the signal that stopped it early, if any."""
        records = self._kept if self._metrics is None or self._console.quiet else read_metrics(self._metrics)
        for sentence in benefit_sentences(records):
            self.print(sentence)
        seconds = seconds_sentence(records)
        if seconds is not None:
            self.print(seconds)
        if stopped_by is not None:
            self.print(f"stopped by {stopped_by} after step {iteration}")

    def _warn_without_signal(self, record: Record) -> None:
        """Warn of consecutive steps with only zero advantages: at the first one and whenever the count has doubled."""
        if record.get("zero_advantages") != 1.0 or "teacher_kl" in record:  # a teacher's divergence is a loss, too
            self._without_signal = 0
            return
        self._without_signal += 1
        count = self._without_signal
        if count & (count - 1):
            return
        iteration, why = record["iteration"], ""
        where = f"step {iteration}" if count == 1 else f"steps {iteration - count + 1} to {iteration}"
        if record.get("uniform_groups") == 1.0 and "reward" in record:
            why = f"; no group has rewards that differ (mean {record['reward']:.3g})"
        self.warn(f"{where}: nothing to learn, all advantages are 0{why}")
        if why and not self._advised:
            self._advised = True
            others = "" if "sampling_rounds" in record else ", or --dynamic-sampling"
            self.warn(f"  if this continues: other prompts, a larger --n-samples-per-prompt{others}")


class StepClock:
    """Measures the wall-clock time of recent steps, including evaluations and checkpoints between them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last = now, now()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps = 0

    def tick(self, is_step: bool = True) -> None:
        """Record the end of a step or, with ``is_step=False``, of the evaluation before the first step."""
        now = self._now()
        if is_step:
            # The first step includes one-time preparation, so later steps replace it.
            if self._steps == 1:
                self._seconds.clear()
            self._seconds.append(now - self._last)
            self._steps += 1
        self._last = now

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds per step over the recent steps."""
        return sum(self._seconds) / len(self._seconds)


def step_line(record: Record, train_iters: int, seconds_per_step: float) -> str:
    """Format a step's key figures within ``WIDTH`` characters; ``LEGEND`` explains them."""
    timing, done = record.get(TIMING, {}), record["iteration"]
    compares = "zero_advantages" in record or "dpo_margin" in record
    figures = (
        # Name, value, format, and drop order: figures with the highest number are dropped first.
        # A pair of a preferred and a rejected response has the mean reward 0.5, whatever is learned.
        ("reward", None if "dpo_margin" in record else record.get("reward"), ".3f", 0),
        ("accuracy", record.get("dpo_accuracy"), ".0%", 1),
        ("loss", record.get("loss"), ".4f", 3),
        ("grad", record.get("grad_norm"), ".3f", 1),
        ("length", record.get("response_tokens"), None, 1),
        ("ended", record.get("ended"), ".0%", 1),
        ("tied", record.get("uniform_groups") if compares else None, ".0%", 1),
        ("reuse", record.get("token_reuse"), ".2f", 2),
        ("tokens/s", timing.get("tokens_per_second"), ",.0f", 4),
    )
    parts = [(f"step {done}/{train_iters}", 0)]
    parts += [(f"{name} {_written(value, form)}", rank) for name, value, form, rank in figures if value is not None]
    if "step_seconds" in timing:
        parts.append((f"{_written(timing['step_seconds'])} s", 0))
    if done < train_iters:
        parts.append((f"left {duration((train_iters - done) * seconds_per_step)}", 0))
    while len(line := "  ".join(text for text, _ in parts)) > WIDTH and max(rank for _, rank in parts):
        parts.remove(max(parts, key=lambda part: part[1]))
    return line


def branch_line(record: Record) -> str | None:
    """Why the sessions of agents branched; None if they did not."""
    names = [name for name in record if name.startswith("branches_") and record[name]]
    parts = [f"{record[name]:.0f} {name.removeprefix('branches_')}" for name in names]
    return f"branches of sessions: {', '.join(parts)} (docs/agents.md)" if parts else None


def evaluation_line(record: Record) -> str | None:
    """Format the results of an evaluation; None if the record has none."""
    figures = (
        ("reward", "eval_reward", ".3f"),
        ("loss", "eval_loss", ".4f"),
        ("length", "eval_response_tokens", None),
        ("ended", "eval_ended", ".0%"),
    )
    parts = [f"{name} {_written(record[key], form)}" for name, key, form in figures if key in record]
    rates = [name for name in record if name.startswith("eval_pass@")]
    parts += [f"{name.removeprefix('eval_')} {_written(record[name], '.3f')}" for name in rates]
    return f"held out, after step {record['iteration']}: " + "  ".join(parts) if parts else None


def duration(seconds: float) -> str:
    """Format a duration with its two largest units."""
    seconds = round(seconds)
    for size, smaller, name, of_smaller in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if seconds >= size:
            return f"{seconds // size}{name}{seconds % size // smaller:02d}{of_smaller}"
    return f"{seconds}s"


def _written(value: float, form: str | None = None) -> str:
    """Format a value with ``form`` or, by default, with a precision that depends on its magnitude."""
    if form is None:
        form = ".2f" if abs(value) < 10 else ".1f" if abs(value) < 100 else ",.0f"
    return format(value, form) if math.isfinite(value) else str(value)
