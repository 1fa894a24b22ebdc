"""Watches a run for what often comes before a collapse: gradient spikes, and a sampler that is not the trainer's model.

**Outliers.** A step whose gradient norm is above ``--grad-norm-outlier-factor`` times the median of the last
``--grad-norm-outlier-window`` norms is an outlier: it is told or, with ``--grad-norm-outlier-action skip``, changes
nothing. The norms of skipped steps enter the median too, so a run whose gradients have grown for good goes on after at
most half a window. Nothing is judged before ``LEAST_NORMS`` norms are known.

**Mismatch.** exp(mean |trainer's - sampler's logprob|) on the weights that sampled is 1 where both agree. Above
``--sampler-mismatch-alarm`` an alarm is counted; ``--sampler-mismatch-stop`` of them in a row end the run.

What is remembered is part of a checkpoint, so a run that continues judges as one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from megatron_dta.config import TrainConfig

LEAST_NORMS = 10


@dataclass
class GuardState:
    """What has been seen so far; ``norms`` are the gradient norms of the last steps, oldest first."""

    norms: list[float] = field(default_factory=list)
    outliers: int = 0
    alarms: int = 0
    alarms_in_a_row: int = 0

    def state_dict(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> GuardState:
        """What ``state_dict`` gave; a new one from the empty state of an older checkpoint."""
        return cls(**state)


class Guard:
    """Judges every step of a run.

    Args:
        state: read and changed here, kept by the checkpoints of whoever owns it.
        report: gets a line for each thing that is wrong.
    """

    def __init__(self, config: TrainConfig, state: GuardState, report: Callable[[str], None]) -> None:
        self._optimization, self._objective = config.optimization, config.objective
        self._state, self._report = state, report

    @property
    def norm_limit(self) -> float | None:
        """Largest gradient norm of the next step that is no outlier; None where nothing is judged."""
        factor = self._optimization.grad_norm_outlier_factor
        if factor is None or len(self._state.norms) < LEAST_NORMS:
            return None
        return factor * median(self._state.norms)

    @property
    def skip_above(self) -> float | None:
        """The limit where outliers are to be skipped."""
        return self.norm_limit if self._optimization.grad_norm_outlier_action == "skip" else None

    def check_norm(self, iteration: int, grad_norm: float) -> dict[str, Any]:
        """Judge the gradient norm of a step; its metrics. Norms that are not finite are the optimizer's business."""
        if self._optimization.grad_norm_outlier_factor is None:
            return {}
        limit = self.norm_limit
        is_outlier = limit is not None and math.isfinite(grad_norm) and grad_norm > limit
        if is_outlier:
            self._state.outliers += 1
            done = "skipped" if self._optimization.grad_norm_outlier_action == "skip" else "trained all the same"
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
        """Judge the mean |trainer's - sampler's logprob| of a step; its metrics.

        Later steps of a collection have other weights: there it says how far these have moved, too, and no alarm is
        given.
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
        """Why the run must end, after too many alarms in a row."""
        stop = self._objective.sampler_mismatch_stop
        if stop is None or self._state.alarms_in_a_row < stop:
            return None
        return (
            f"sampler and trainer disagreed in the last {stop} collections (--sampler-mismatch-stop {stop}), so the "
            "run ends here; checkpoints of earlier steps are kept, this step is not saved"
        )
