"""Says in a sentence where the seconds of a run's start went, and at its end where those of its steps went.

The latter also names what to change first. The change is the one for which the records count most seconds of a step:
sampling while requests wait, or while few are left; rewards; ranks that wait for the slowest one; trees and plans; and
if none of these is a tenth of the step, the longest phase. The first two steps, with one-time preparation, do not count
if there are others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

PHASES = {
    "sampling": "sampling_seconds",
    "prompts and rewards": "reward_seconds",
    "logprobs": "logprobs_seconds",
    "trees and plans": "plan_seconds",
    "training": "train_seconds",
    "critic": "critic_seconds",
    "update": "update_seconds",
}
_PREPARING, _LEAST = 2, 0.1


def seconds_sentence(records: Sequence[Mapping[str, Any]]) -> str | None:
    """The sentence; None without a timed step."""
    timings = [record["timing"] for record in records if "step_seconds" in record.get("timing", {})]
    if not timings:
        return None
    timings = [_divided(timing) for timing in timings[_PREPARING:] or timings]
    names = {name for timing in timings for name in timing}
    mean = {name: fmean(timing.get(name, 0.0) for timing in timings) for name in names}
    step = mean["step_seconds"]
    phases = {phase: mean[name] for phase, name in PHASES.items() if mean.get(name, 0.0) >= 0.005 * step}
    phases["other"] = max(0.0, step - sum(phases.values()))
    parts = [f"{phase} {seconds / step:.0%}" for phase, seconds in sorted(phases.items(), key=lambda item: -item[1])]
    seconds, change = max(_changes(mean, phases), key=lambda pair: pair[0])
    return f"Time: a step took {step:.3g} s: {', '.join(parts)}. First to change ({seconds:.2g} s a step): {change}."


def start_sentence(seconds: Mapping[str, float], first_step: Mapping[str, Any]) -> str:
    """Where the seconds until the end of the first step went, from those of ``start_clock`` and the step's timing."""
    step = _divided(first_step)
    phases = {phase: step[name] for phase, name in PHASES.items() if step.get(name, 0.0) >= 0.05}
    parts = [f"{part} {value:.1f}" for part, value in seconds.items() if value >= 0.05]
    inside = ", ".join(f"{phase} {value:.1f}" for phase, value in phases.items())
    return f"Start: first step done after {sum(seconds.values()):.1f} s: {', '.join(parts)}" + (
        f" ({inside})" if inside else ""
    )


def _divided(timing: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step; the seconds of its collection belong to sampling and to what is around it."""
    numbers = {name: float(value) for name, value in timing.items() if isinstance(value, (int, float))}
    collected = numbers.get("collect_seconds", 0.0)
    # All steps of a rollout batch repeat what the engine counted, only one waits for it.
    sampling = min(numbers.get("sampling_seconds", collected), collected)
    for name in ("waiting", "tail"):
        numbers[f"sampling_{name}_seconds"] = min(sampling, numbers.get(f"sampling_{name}_seconds", 0.0))
    waits = numbers.get("train_seconds", 0.0) * (1 - numbers.get("rank_balance", 1.0))
    return numbers | {"sampling_seconds": sampling, "reward_seconds": collected - sampling, "rank_seconds": waits}


def _changes(mean: Mapping[str, float], phases: Mapping[str, float]) -> list[tuple[float, str]]:
    """What may be changed, with the seconds of a step in which it would have worked."""
    changes = [
        (
            mean["sampling_waiting_seconds"],
            "requests waited because as many ran as may; raise --inference-max-requests or, where it has no value, "
            "leave more memory for K/V",
        ),
        (
            mean["sampling_tail_seconds"],
            "less than a quarter of the requests were still running; lower --rollout-max-response-len"
            + (", or give --rollout-speculation das" if "speculation_saved_seconds" not in mean else ""),
        ),
        (mean["reward_seconds"], "prompts and rewards, while no token was sampled; a faster reward"),
        (mean["rank_seconds"], "data-parallel ranks waited for the slowest; more prompts a step, or fewer replicas"),
        (phases.get("trees and plans", 0.0), "trees and plans; give --tree-segment-tokens"),
    ]
    changes = [(seconds, change) for seconds, change in changes if seconds >= _LEAST * mean["step_seconds"]]
    longest = max(phases, key=lambda phase: phases[phase])
    return changes or [
        (phases[longest], f"{longest}, the longest phase; more GPUs or replicas, or fewer tokens a step")
    ]
