"""Trains in forked children and kills them at chosen moments: one import of Megatron serves many short runs.

    python resume_worker.py SCENARIOS.json

holds a list of scenarios, each ``{"argv": [...], "kills": [...]}``: the same command is started once for each kill and
once more to the end. Kills, each at its n-th occurrence in that run:

    loading:n   a checkpoint is about to be read
    step:n      the gradients of a step are there, but the weights are those before it
    row:n       half of a metrics line is written
    half:n      a checkpoint is written, one of its files only in part
    renamed:n   a checkpoint has its name, but the tracker does not name it yet
    saved:n     the tracker names the new checkpoint
    term:n      SIGTERM once a metrics line is written; the run must end by itself

Prints one JSON list of exit statuses for each scenario, negative for signals.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dta import train
from megatron_dta.training.checkpoint import save_load as checkpoint
from megatron_dta.training.checkpoint import writer as checkpoint_writer
from megatron_dta.training.checkpoint.files import unfinished_name
from megatron_dta.training.monitor import metrics
from megatron_dta.training.optimizer.build import TrainingOptimizer


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_row(_: Callable, log: metrics.MetricsLog, record: dict) -> None:
    log._file.write(json.dumps(record)[:20])
    log._file.flush()
    die()


def half_checkpoint(_: Callable, write: checkpoint_writer.CheckpointWrite, *__: Any) -> None:
    os.truncate(unfinished_name(write.path) / "__0_0.distcp", 100)
    die()


def then(signal_number: int) -> Callable[..., None]:
    """The call, and then the signal."""
    return lambda original, *arguments: (original(*arguments), os.kill(os.getpid(), signal_number))


KILLS = {
    "loading": (checkpoint, "read_checkpoint", die),
    "step": (TrainingOptimizer, "step", die),
    "row": (metrics.MetricsLog, "write", half_row),
    "half": (checkpoint_writer.CheckpointWrite, "_publish", half_checkpoint),
    "renamed": (checkpoint, "replace_text", die),
    "saved": (checkpoint, "replace_text", then(signal.SIGKILL)),
    "term": (metrics.MetricsLog, "write", then(signal.SIGTERM)),
}


def arm(kill: str) -> None:
    """Prepare this process to kill itself: at the moment, not some time after its start, on machines of any speed."""
    moment, _, number = kill.partition(":")
    owner, name, act = KILLS[moment]
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == int(number):
            return act(original, *arguments)
        return original(*arguments, **settings)

    setattr(owner, name, counted)


def train_in_child(argv: list[str], prepare: Callable[[], None]) -> int:
    """Process ID of a forked child that trains."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            prepare()
            sys.argv = ["train", *argv]
            train.main()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return child


def run_once(argv: list[str], kill: str | None) -> int:
    """Train in a child; its exit status, negative for the signal that ended it."""
    child = train_in_child(argv, lambda: arm(kill) if kill is not None else None)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    scenarios = json.loads(Path(sys.argv[1]).read_text())
    statuses = [[run_once(scenario["argv"], kill) for kill in [*scenario["kills"], None]] for scenario in scenarios]
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
