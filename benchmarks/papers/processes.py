"""Runs parts of an experiment in processes of their own, and keeps their results for the next call of the experiment.

Processes have imported the project before they are needed, which saves 5 s each: on a CPU they are forked off this one,
with a GPU, which does not survive a fork, started ahead. Their output goes to ``log.txt`` in the part's folder,
and ``result.json`` appears when it has ended. A part whose ``result.json`` was made with the same arguments is not
repeated; what an interrupted part has left is removed.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from megatron_dta.common.command_line import json_text
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing

_PROGRESS_SECONDS = 15.0


@dataclass(frozen=True)
class Job:
    """A part: its result is that of ``function(folder, **arguments)``.

    Attributes:
        name: of the part, and of its folder.
        arguments: plain values; they may name files of other parts.
        progress: a line about the running part, from its folder; None if there is nothing to say.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    progress: Callable[[Path], str | None] = lambda folder: None


class Processes:
    """Runs jobs; those that have begun run concurrently.

    Args:
        root: folder of all parts.
        preload: modules that processes have imported before they are needed.
        jobs: processes to start ahead on a GPU.
    """

    def __init__(self, root: Path, preload: Sequence[str], jobs: int = 1) -> None:
        self._root, self._preload = root.resolve(), tuple(preload)
        self._results: dict[str, Any] = {}
        self._running: dict[str, tuple[BaseProcess, float]] = {}
        self._waiting: list[tuple[BaseProcess, Connection]] = []
        self._on_gpu = torch.cuda.is_available()
        self._context = multiprocessing.get_context("spawn" if self._on_gpu else "fork")
        if not self._on_gpu:
            _import_all(preload)
        for _ in range(jobs if self._on_gpu else 0):
            self._start()

    def begin(self, job: Job) -> None:
        """Start a job unless it has finished earlier or is running; ``run`` waits for it."""
        if job.name in self._results or job.name in self._running:
            return
        folder = self._root / job.name
        done = _read(folder / "result.json")
        if done is not None and done["arguments"] == self._asked(job):
            print(f"{job.name}: finished earlier", flush=True)
            self._results[job.name] = done["result"]
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self._on_gpu or not self._waiting:
            self._start()
        process, jobs = self._waiting.pop(0)
        jobs.send((job.function, folder, dict(job.arguments)))
        jobs.close()
        self._running[job.name] = process, time.monotonic()

    def _start(self) -> None:
        """Start a process that waits for a job."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_in_process, args=(self._preload, receiver))
        process.start()
        receiver.close()
        self._waiting.append((process, sender))

    def run(self, job: Job) -> tuple[Path, Any]:
        """The folder of a job, and its result.

        Raises:
            InputError: the job has failed.
        """
        self.begin(job)
        folder = self._root / job.name
        if job.name not in self._results:
            process, began = self._running[job.name]
            while process.is_alive():
                process.join(_PROGRESS_SECONDS)
                line = job.progress(folder) if process.is_alive() else None
                if line is not None:
                    print(f"{job.name}: {line}", flush=True)
            del self._running[job.name]
            value = _read(folder / "value.json")
            if value is None:
                raise InputError(f"{job.name} has failed: {_last_line(folder / 'log.txt')} ({folder / 'log.txt'})")
            kept = {"arguments": self._asked(job), "result": value["result"]}
            with replacing(folder / "result.json") as temporary:
                temporary.write_text(json_text(kept) + "\n", encoding="utf-8")
            (folder / "value.json").unlink()
            print(f"{job.name}: {time.monotonic() - began:.0f} s", flush=True)
            self._results[job.name] = value["result"]
        return folder, self._results[job.name]

    def close(self) -> list[str]:
        """End what is still running or waiting; returns the names of the jobs that were running."""
        interrupted = list(self._running)
        for process, _ in [*self._running.values(), *self._waiting]:
            process.kill()
            process.join()
        self._running.clear()
        self._waiting.clear()
        return interrupted

    def _asked(self, job: Job) -> Any:
        """The arguments as they are stored: a folder that has been moved, with all in it, is still valid."""
        return json.loads(json_text(dict(job.arguments)).replace(str(self._root), "ROOT"))


def _in_process(preload: Sequence[str], jobs: Connection) -> None:
    """Run a part with its output in ``log.txt``, and write what it returns to ``value.json``."""
    _import_all(preload)
    try:
        function, folder, arguments = jobs.recv()
    except EOFError:
        return  # no job is left
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def run() -> None:
        result = function(folder, **arguments)
        with replacing(folder / "value.json") as temporary:
            temporary.write_text(json_text({"result": result}) + "\n", encoding="utf-8")
        print(f"{time.process_time():.1f} s of CPU time")

    run_entry_point(run)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
