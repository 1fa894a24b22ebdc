"""Runs a conversion that writes independent files: in several processes, resumable, and atomic.

    TARGET.tmp/conversion.json     fingerprint of the input and the output
    TARGET.tmp/FILE                a file in progress, or complete
    TARGET.tmp/FILE.done           the record of a complete file
    TARGET                         the result, once every file is complete

A killed conversion that is started again with the same input continues with the incomplete files. A failure, such as a
full disk, deletes everything. The folder is renamed to TARGET only when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replace_text

UNFINISHED = ".tmp"
_MANIFEST, _DONE = "conversion.json", ".done"
# The job and the function that counts bytes, set in every process that writes files.
_worker: tuple[Job, Callable[[int], None]] | None = None


class Job(Protocol):
    """The description of a conversion. It is sent to the worker processes, so it must be picklable."""

    def files(self) -> dict[str, int]:
        """Names of the files and the approximate size of each in bytes."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that identify the input and the requested output."""

    def write_file(self, name: str, folder: Path, advance: Callable[[int], None]) -> Any:
        """Write one file and report bytes with ``advance``; returns plain values for ``finish``."""

    def finish(self, folder: Path, records: dict[str, Any]) -> None:
        """Write the files that depend on all others; ``records`` holds each file's result of ``write_file``."""


def source_stamp(paths: list[Path]) -> list[list[Any]]:
    """Values that change when one of the files changes."""
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def check_target(target: Path) -> None:
    """Refuse an output folder that exists already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target}: exists already; give a folder that does not, or delete it first")


def run_job(job: Job, target: Path, processes: int, console: Console) -> None:
    """Write all files of ``job`` as the folder ``target``.

    Raises:
        InputError: the folder exists, holds another unfinished conversion, or cannot be written.
    """
    check_target(target)
    folder = target.with_name(target.name + UNFINISHED)
    files = job.files()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            records = _resume(folder, job, files)
            if records:
                console.print(f"continuing: {len(records)} of {len(files)} files are complete", soft_wrap=True)
            with _deleted_on_failure(folder):
                _check_space(folder, sum(size for name, size in files.items() if name not in records))
                with _progress(console, files, records) as advance:
                    for name, record in _written(job, folder, files, records, processes, advance):
                        records[name] = record
                job.finish(folder, records)
                for path in (folder / _MANIFEST, *folder.rglob(f"*{_DONE}")):
                    path.unlink()
                os.replace(folder, target)
    except BrokenProcessPool:
        raise InputError(
            f"{target}: a process of the conversion was killed, perhaps for lack of memory; the same command continues"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{target}: cannot be written ({reason}); nothing of it is left") from error


@contextmanager
def _deleted_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, InputError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that prevents a second process from writing the same files."""
    file = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: another process is writing this conversion now") from None
        yield
    finally:
        os.close(file)


def _resume(folder: Path, job: Job, files: dict[str, int]) -> dict[str, Any]:
    """Records of the files that an earlier process completed."""
    text = json.dumps({**job.fingerprint(), "files": files}, sort_keys=True)
    stamp = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()})
    manifest = folder / _MANIFEST
    if not manifest.exists():
        if any(folder.iterdir()):
            raise InputError(f"{folder}: is in the way and was not made by a conversion; delete or move it")
        with _deleted_on_failure(folder):
            replace_text(manifest, stamp)
    elif manifest.read_text(encoding="utf-8") != stamp:
        raise InputError(f"{folder}: holds an unfinished conversion of other input or to other output; delete it")
    records = {}
    for name in files:
        done = folder / (name + _DONE)
        if done.exists():
            size, record = json.loads(done.read_text(encoding="utf-8"))
            if (folder / name).stat().st_size == size:
                records[name] = record
    return records


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(f"{folder.parent}: has {free:,} bytes free; the conversion needs {needed:,}")


@contextmanager
def _progress(console: Console, files: dict[str, int], done: dict[str, Any]) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("Converting", total=sum(files.values()))
        progress.advance(task, sum(files[name] for name in done))
        yield lambda count: progress.advance(task, count)


def _written(
    job: Job, folder: Path, files: dict[str, int], done: dict[str, Any], processes: int, advance: Callable[[int], None]
) -> Iterator[tuple[str, Any]]:
    """Write the files that are not ``done`` and yield each one's name and record."""
    names = [name for name in files if name not in done]
    if processes == 1 or len(names) < 2:
        for name in names:
            yield name, _complete(job, folder, name, advance)
        return
    # The server imports PyTorch once and forks the processes; it runs no thread, so that is safe.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([type(job).__module__])
    count = context.Value("q", 0)
    pool = ProcessPoolExecutor(min(processes, len(names)), context, initializer=_start_worker, initargs=(job, count))
    seen = 0
    try:
        waiting: dict[Future, str] = {pool.submit(_complete_in_worker, folder, name): name for name in names}
        while waiting:
            finished, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            advance(count.value - seen)
            seen = count.value
            for future in finished:
                yield waiting.pop(future), future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _complete(job: Job, folder: Path, name: str, advance: Callable[[int], None]) -> Any:
    record = job.write_file(name, folder, advance)
    replace_text(folder / (name + _DONE), json.dumps([(folder / name).stat().st_size, record]))
    return record


def _start_worker(job: Job, count: Any) -> None:
    global _worker

    def advance(bytes_written: int) -> None:
        with count.get_lock():
            count.value += bytes_written

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    _worker = job, advance
    threading.Thread(target=end_with_parent, daemon=True).start()


def _complete_in_worker(folder: Path, name: str) -> Any:
    assert _worker is not None
    return _complete(_worker[0], folder, name, _worker[1])
