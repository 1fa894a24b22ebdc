"""Trains in forked children and kills them at chosen moments: one import of Megatron serves many short runs.

    python resume_worker.py SCENARIOS.json

holds a list of scenarios, each ``{"argv": [...], "kills": [...]}``: the same command is started once for each kill and
once more to the end. Kills, each at its n-th occurrence in that run:

    row:n       half of a metrics line is written
    half:n      a checkpoint is written, one of its files only in part
    renamed:n   a checkpoint has its name, but the tracker does not name it yet
    saved:n     the tracker names the new checkpoint
    after:s     s seconds after the start (SIGKILL from outside)
    term:n      SIGTERM from outside once n metrics lines exist; the run must end by itself

Prints one JSON list of exit statuses for each scenario, negative for signals.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dta import train
from megatron_dta.training.checkpoint import save_load as checkpoint
from megatron_dta.training.checkpoint import writer as checkpoint_writer
from megatron_dta.training.checkpoint.files import unfinished_name
from megatron_dta.training.monitor import metrics


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_occurrence(owner: Any, name: str, number: int, act: Callable[..., None]) -> None:
    """Let the ``number``-th call of ``owner.name`` be ``act(original, *arguments)``."""
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return act(original, *arguments) if len(calls) == number else original(*arguments)

    setattr(owner, name, counted)


def arm(kill: str) -> None:
    """Prepare this process to kill itself."""
    kind, _, number = kill.partition(":")
    if kind == "row":

        def half_row(original: Callable, log: metrics.MetricsLog, record: dict) -> None:
            log._file.write(json.dumps(record)[:20])
            log._file.flush()
            die()

        at_occurrence(metrics.MetricsLog, "write", int(number), half_row)
    elif kind == "half":

        def half_checkpoint(original: Callable, write: checkpoint_writer.CheckpointWrite) -> None:
            os.truncate(unfinished_name(write.path) / "__0_0.distcp", 100)
            die()

        at_occurrence(checkpoint_writer.CheckpointWrite, "_publish", int(number), half_checkpoint)
    elif kind == "renamed":
        at_occurrence(checkpoint, "replace_text", int(number), lambda *arguments: die())
    elif kind == "saved":
        at_occurrence(checkpoint, "replace_text", int(number), lambda original, *a: (original(*a), die()))


def run_once(argv: list[str], kill: str | None) -> int:
    """Train in a child; its exit status, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            arm(kill or "")
            sys.argv = ["train", *argv]
            train.main()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    kind, _, number = (kill or "").partition(":")
    if kind == "after":
        time.sleep(float(number))
        os.kill(child, signal.SIGKILL)
    elif kind == "term":
        rows = Path(argv[argv.index("--save") + 1]) / "metrics.jsonl"
        while not rows.exists() or rows.read_text().count("\n") < int(number):
            time.sleep(0.005)
        os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    scenarios = json.loads(Path(sys.argv[1]).read_text())
    statuses = [[run_once(scenario["argv"], kill) for kill in [*scenario["kills"], None]] for scenario in scenarios]
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
