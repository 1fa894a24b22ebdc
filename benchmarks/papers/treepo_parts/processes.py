"""Runs a part of the experiment in a process of its own, and keeps its result for the next call of the experiment.

A process starts from a server that has imported the project, which takes 0.1 s instead of 5 s. Its output goes to
``log.txt`` in the part's folder, and ``result.json`` appears when it has ended. A part whose ``result.json`` was
made with the same arguments is not repeated; what an interrupted part has left is removed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_dta.common.command_line import json_text
from megatron_dta.common.errors import InputError, run_entry_point
from megatron_dta.common.files import replacing

_PRELOAD = ["papers.treepo_parts.training", "papers.treepo_parts.sampling", "papers.tables"]
_PROGRESS_SECONDS = 15.0


class Processes:
    """Runs parts one after the other.

    Args:
        root: folder of all parts; their arguments may name files in it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._results: dict[str, Any] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        # Python 3.11 does not tell the server where to find the modules.
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        progress: Callable[[Path], str | None] = lambda folder: None,
    ) -> tuple[Path, Any]:
        """The folder of a part, and the result of ``function(folder, **arguments)``.

        Args:
            name: of the part, and of its folder.
            arguments: plain values.
            progress: a line about the running part, from its folder; None if there is nothing to say.

        Raises:
            InputError: the part has failed.
        """
        folder = self._root / name
        if name in self._results:
            return folder, self._results[name]
        # A folder that has been moved, with all in it, is still valid.
        asked = json.loads(json_text(dict(arguments)).replace(str(self._root), "ROOT"))
        done = _read(folder / "result.json")
        if done is not None and done["arguments"] == asked:
            print(f"{name}: finished earlier", flush=True)
            self._results[name] = done["result"]
            return folder, done["result"]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        self._wait(name, function, dict(arguments), progress)
        found = _read(folder / "value.json")
        if found is None:
            raise InputError(f"{name} has failed: {_last_line(folder / 'log.txt')} ({folder / 'log.txt'})")
        with replacing(folder / "result.json") as temporary:
            temporary.write_text(json_text({"arguments": asked, "result": found["result"]}) + "\n", encoding="utf-8")
        (folder / "value.json").unlink()
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        self._results[name] = found["result"]
        return folder, found["result"]

    def _wait(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        progress: Callable[[Path], str | None],
    ) -> None:
        """Run the process to its end; it ends with this one."""
        folder = self._root / name
        process = self._context.Process(target=_in_process, args=(function, folder, arguments))
        process.start()
        try:
            while process.is_alive():
                process.join(_PROGRESS_SECONDS)
                line = progress(folder) if process.is_alive() else None
                if line is not None:
                    print(f"{name}: {line}", flush=True)
        finally:
            if process.is_alive():
                process.kill()
                process.join()


def _in_process(function: Callable[..., Any], folder: Path, arguments: dict[str, Any]) -> None:
    """Run a part with its output in ``log.txt``, and write what it returns to ``value.json``."""
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def run() -> None:
        result = function(folder, **arguments)
        with replacing(folder / "value.json") as temporary:
            temporary.write_text(json_text({"result": result}) + "\n", encoding="utf-8")
        print(f"{time.process_time():.1f} s of CPU time")

    run_entry_point(run)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
