"""Detects frequent precursors of a collapse: gradient spikes, and a mismatch between sampler and trainer.

**Outliers.** A step is an outlier if its gradient norm is above ``--grad-norm-outlier-factor`` times the median of the
last ``--grad-norm-outlier-window`` norms. Outliers are reported and, with ``--grad-norm-outlier-action skip``, also
skipped. The norms of skipped steps enter the median too, so a run whose gradients have grown permanently continues
after at most half a window. No step is an outlier before ``LEAST_NORMS`` norms are known.

**Mismatch.** exp(mean |trainer's - sampler's logprob|), computed on the weights that sampled, is 1 if both agree. A
value above ``--sampler-mismatch-alarm`` is an alarm; ``--sampler-mismatch-stop`` consecutive alarms end the run.

The guard's state is saved in checkpoints, so a continued run behaves like an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_dta.training.config import TrainConfig

LEAST_NORMS = 10


@dataclass
class GuardState:
    """The guard's records so far; ``norms`` holds the gradient norms of the last steps, oldest first."""

    norms: list[float] = field(default_factory=list)
    outliers: int = 0
    alarms: int = 0
    alarms_in_a_row: int = 0


class Guard:
    """Checks the gradient norm and the sampler's logprobs of every step.

    Args:
        state: the guard's records, which it updates in place. The caller saves them in checkpoints.
        report: called with a line for each outlier and each alarm.
    """

    def __init__(self, config: TrainConfig, state: GuardState, report: Callable[[str], None]) -> None:
        self._optimization, self._objective = config.optimization, config.objective
        self._state, self._report = state, report

    @property
    def norm_limit(self) -> float | None:
        """Gradient norm above which the next step is an outlier; None if no limit applies."""
        factor = self._optimization.grad_norm_outlier_factor
        if factor is None or len(self._state.norms) < LEAST_NORMS:
            return None
        return factor * median(self._state.norms)

    @property
    def skip_above(self) -> float | None:
        """The limit if outliers are skipped, otherwise None."""
        return self.norm_limit if self._optimization.grad_norm_outlier_action == "skip" else None

    def check_norm(self, iteration: int, grad_norm: float) -> dict[str, Any]:
        """Check the gradient norm of a step and return metrics. The optimizer handles norms that are not finite."""
        if self._optimization.grad_norm_outlier_factor is None:
            return {}
        limit = self.norm_limit
        is_outlier = limit is not None and math.isfinite(grad_norm) and grad_norm > limit
        if is_outlier:
            self._state.outliers += 1
            done = "skipped" if self._optimization.grad_norm_outlier_action == "skip" else "not skipped"
            self._report(
                f"step {iteration}: the gradient norm {grad_norm:.4g} is above {limit:.4g}, "
                f"--grad-norm-outlier-factor {self._optimization.grad_norm_outlier_factor:g} times the median of the "
                f"last {len(self._state.norms)} steps; {done}"
            )
        if math.isfinite(grad_norm):
            window = self._optimization.grad_norm_outlier_window
            self._state.norms = [*self._state.norms, grad_norm][-window:]
        return {"grad_norm_outlier": is_outlier, "grad_norm_outliers": self._state.outliers}

    def check_sampler(self, iteration: int, gap: float, sampled_with_these_weights: bool) -> dict[str, Any]:
        """Check the mean |trainer's - sampler's logprob| of a step and return metrics.

        In later steps of a rollout batch the weights have changed since sampling. The value then also measures that
        change, so these steps raise no alarm.
        """
        ratio = math.exp(gap) if gap < 700 else math.inf
        record: dict[str, Any] = {"sampler_probability_ratio": ratio}
        limit = self._objective.sampler_mismatch_alarm
        if limit is None or not sampled_with_these_weights:
            return record
        alarm = not ratio <= limit
        self._state.alarms += alarm
        self._state.alarms_in_a_row = self._state.alarms_in_a_row + 1 if alarm else 0
        if alarm:
            self._report(
                f"step {iteration}: sampler and trainer disagree: exp(mean |difference of logprobs|) is {ratio:.4f}, "
                f"above --sampler-mismatch-alarm {limit:g}"
            )
        return record | {"sampler_mismatch_alarm": alarm, "sampler_mismatch_alarms": self._state.alarms}

    @property
    def must_stop(self) -> str | None:
        """The reason to end the run after too many consecutive alarms; None if it may continue."""
        stop = self._objective.sampler_mismatch_stop
        if stop is None or self._state.alarms_in_a_row < stop:
            return None
        return (
            f"sampler and trainer disagreed in the last {stop} rollout batches (--sampler-mismatch-stop {stop}), so "
            "the run ends here; checkpoints of earlier steps are kept, this step is not saved"
        )
