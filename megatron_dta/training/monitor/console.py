"""What a run says on the terminal: a line for each step and evaluation, warnings, and at the end what was saved.

Lines of steps are at most ``WIDTH`` characters long: where one would be longer, it leaves out figures, the least
important ones first. All of them are in the metrics file.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_dta.config import TrainConfig
from megatron_dta.training.monitor.benefits import benefit_sentences
from megatron_dta.training.monitor.metrics import TIMING, read_metrics

WIDTH = 120
LEGEND = "length: mean trained tokens; ended: not cut; tied: groups of equal rewards; reuse: tokens per computed one"
# The time that is left is estimated from as many steps.
RECENT_STEPS = 20

Record = Mapping[str, Any]


class RunConsole:
    """Prints on the first process, whose ``console`` is the only one that is not quiet.

    Args:
        metrics: the metrics file, or None where none is written.
    """

    def __init__(self, console: Console, config: TrainConfig, metrics: Path | None) -> None:
        self._console, self._metrics = console, metrics
        self._train_iters, self._interval = config.optimization.train_iters, config.logging.log_interval
        self._clock = StepClock()
        # Without a file, what the last line speaks of must be kept.
        self._kept: list[Record] = []
        self._without_signal, self._advised = 0, False

    def print(self, line: str) -> None:
        """A line that may be as long as the paths in it."""
        self._console.print(line, soft_wrap=True, markup=False)

    def warn(self, line: str) -> None:
        """A line that needs attention."""
        self._console.print(line, style="yellow", soft_wrap=True, markup=False)

    def report(self, record: Record) -> None:
        """Print what a step's record says, and nothing of steps that --log-interval leaves out but warnings."""
        iteration, last = record["iteration"], record["iteration"] == self._train_iters
        self._clock.tick(is_step=iteration > 0)
        if self._metrics is None and not self._console.quiet:
            self._kept.append(record)
        if record.get("skipped") and not record.get("grad_norm_outlier"):
            self.warn(
                f"step {iteration}: skipped, the weights are unchanged: the loss is {record['loss']}, "
                f"the gradient norm {record['grad_norm']}"
            )
        self._warn_without_signal(record)
        if iteration > 0 and (iteration % self._interval == 0 or last):
            self.print(step_line(record, self._train_iters, self._clock.seconds_per_step))
        evaluated = evaluation_line(record)
        if evaluated is not None:
            self.print(evaluated)

    def finish(self, iteration: int, stopped_by: str | None) -> None:
        """Say what the methods of the run were worth, and what has ended it early."""
        records = self._kept if self._metrics is None or self._console.quiet else read_metrics(self._metrics)
        for sentence in benefit_sentences(records):
            self.print(sentence)
        if stopped_by is not None:
            self.print(f"stopped by {stopped_by} after step {iteration}")

    def _warn_without_signal(self, record: Record) -> None:
        """Warn of steps whose advantages are all 0: the first in a row, and whenever their number has doubled."""
        if record.get("zero_advantages") != 1.0:
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
            self.warn("  if this goes on: other prompts, a larger --n-samples-per-prompt, or --dynamic-sampling")


class StepClock:
    """Seconds of recent steps by the wall clock, with evaluations and checkpoints between them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last = now, now()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps = 0

    def tick(self, is_step: bool = True) -> None:
        """A step has ended, or the evaluation before the first."""
        now = self._now()
        if is_step:
            # The first step prepares what later ones use.
            if self._steps == 1:
                self._seconds.clear()
            self._seconds.append(now - self._last)
            self._steps += 1
        self._last = now

    @property
    def seconds_per_step(self) -> float:
        """Mean over the recent steps."""
        return sum(self._seconds) / len(self._seconds)


def step_line(record: Record, train_iters: int, seconds_per_step: float) -> str:
    """What a person wants to see of a step, within ``WIDTH`` characters; ``LEGEND`` explains it."""
    timing, done = record.get(TIMING, {}), record["iteration"]
    compares = "zero_advantages" in record or "dpo_margin" in record
    figures = (
        # Name, value, how it is written, and its rank: the highest ones are left out first.
        ("reward", record.get("reward"), ".3f", 0),
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


def evaluation_line(record: Record) -> str | None:
    """What an evaluation has found; None if there was none."""
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
    """A time with its two largest units."""
    seconds = round(seconds)
    for size, smaller, name, of_smaller in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if seconds >= size:
            return f"{seconds // size}{name}{seconds % size // smaller:02d}{of_smaller}"
    return f"{seconds}s"


def _written(value: float, form: str | None = None) -> str:
    """The value in ``form``; without one with as many digits as its size leaves worth reading."""
    if form is None:
        form = ".2f" if abs(value) < 10 else ".1f" if abs(value) < 100 else ",.0f"
    return format(value, form) if math.isfinite(value) else str(value)
