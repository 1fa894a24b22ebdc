"""Writes one checkpoint from all ranks and renames it when every rank is done.

    1. Rank 0 creates an empty folder with a temporary name.
    2. The ranks plan the save together and each writes its shards: immediately or, with ``background``, in a thread
       from a copy on the host while training continues.
    3. The ranks agree that all have written. Each reads its own files again for their checksums. Rank 0 adds the
       metadata and the checksums of all files and renames the folder.

With ``fully_parallel``, the data-parallel ranks divide replicated shards by size, with
Megatron's own distribution; without it the first of them writes these shards. The checkpoint's content is the same.

An error on one rank ends the save on all ranks, and the temporary folder is deleted. Planning and agreement are
collective, so they run on the main thread, at the same points of the run on every rank.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.training.checkpoint.files import unfinished_name
from megatron_dta.training.checkpoint.integrity import Checksums, checksums_of, write_checksums

# PyTorch's archive writer raises RuntimeError if the system refuses a write.
_WRITE_ERRORS = (OSError, RuntimeError, CheckpointException)


class _AgreeingStrategy(TorchDistSaveShardedStrategy):
    """Megatron's shard writer, preceded by an agreement of all ranks that the earlier parts were written.

    The ranks may plan the shards collectively only after this agreement.
    """

    def __init__(self, path: Path, fully_parallel: bool) -> None:
        super().__init__("torch_dist", 1)
        self.path, self.fully_parallel, self.reached = path, fully_parallel, False

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        self.reached = True
        raise_on_all(self.path, None)
        group = current_mesh().data_group
        if self.fully_parallel and group is not None:
            FullyParallelSaveStrategyWrapper(self, group).apply_saving_parallelization(sharded_state_dict)
        # Newer versions name the package whose writers to use. The default package may not be installed.
        own_writers = ("mcore",) if args or kwargs else ()
        return super().async_save(sharded_state_dict, checkpoint_dir, *own_writers)


class CheckpointWrite:
    """A checkpoint in progress. Every rank creates one and calls ``finish`` once, at the same point of the run."""

    def __init__(
        self, path: Path, state: dict[str, Any], background: bool = False, fully_parallel: bool = False
    ) -> None:
        megatron_patches.write_checkpoints_in_process()
        # This logger repeats the errors that the writer raises.
        logging.getLogger(f"{dist_checkpointing.__name__}.strategies.filesystem_async").setLevel(logging.CRITICAL)
        self.path, self._unfinished = path, unfinished_name(path)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._checksums: Checksums = {}
        self._request: Any = None
        on_rank0(path, self._make_folder)
        if background:
            _copy_host_tensors(state)
        strategy = _AgreeingStrategy(path, fully_parallel)
        try:
            self._save(state, strategy, background)
        except InputError:
            self._discard()
            raise
        if background:
            self._start_thread()

    def _save(self, state: dict[str, Any], strategy: _AgreeingStrategy, background: bool) -> None:
        try:
            self._request = dist_checkpointing.save(
                state, str(self._unfinished), strategy, async_sharded_save=background
            )
        except _WRITE_ERRORS as error:
            if not strategy.reached:
                raise_on_all(self.path, error)
            raise _cannot_write(self.path, error) from error

    @property
    def done(self) -> bool:
        """Whether this rank has written its shards (or failed to)."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the shards of all ranks and give the checkpoint its final name."""
        try:
            if self._thread is None:
                self._read_own_files()
            else:
                self._thread.join()
            raise_on_all(self.path, self._error)
            if self._thread is not None:
                self._finalize()
            known = {
                name: entry
                for checksums in current_mesh().gather_from_all(self._checksums)
                for name, entry in checksums.items()
            }
            on_rank0(self.path, lambda: self._publish(known))
        except InputError:
            self._discard()
            raise

    def _finalize(self) -> None:
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except _WRITE_ERRORS as error:
            raise _cannot_write(self.path, error) from error

    def _read_own_files(self) -> None:
        try:
            files = self._unfinished.glob(f"__{torch.distributed.get_rank()}_*.distcp")
            self._checksums = checksums_of(self._unfinished, [path.name for path in files])
        except OSError as error:
            self._error = error

    def _discard(self) -> None:
        """Delete the temporary folder. No rank writes to it any more at this point."""
        if current_mesh().rank == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _make_folder(self) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)

    def _publish(self, known: Checksums) -> None:
        others = [path.name for path in self._unfinished.iterdir() if path.name not in known]
        write_checksums(self._unfinished, known | checksums_of(self._unfinished, others))
        # A folder of this name belongs to a run that was killed before the tracker named it.
        shutil.rmtree(self.path, ignore_errors=True)
        os.replace(self._unfinished, self.path)

    def _start_thread(self) -> None:
        """Copy GPU tensors to the host, then write the shards in a thread. ``finish`` raises the thread's errors."""
        arguments = list(self._request.async_fn_args)
        if self._request.preload_fn is not None:
            arguments[1] = self._request.preload_fn()

        def write() -> None:
            try:
                if self._request.async_fn is not None:
                    self._request.async_fn(*arguments, **self._request.async_fn_kwargs)
                self._read_own_files()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=write, name=f"write {self.path.name}", daemon=True)
        self._thread.start()


def raise_on_all(path: Path, error: BaseException | None) -> None:
    """Raise ``InputError`` on every rank if any rank passes an error. Every rank must call this."""
    reasons = current_mesh().gather_from_all(None if error is None else reason_of(error))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            where = f"rank {rank}: " if len(reasons) > 1 else ""
            raise InputError(f"{path}: the checkpoint cannot be written ({where}{reason})") from error


@contextmanager
def refusing_on_all() -> Iterator[None]:
    """Raise an ``InputError`` of any rank inside on all ranks. Every rank must enter."""
    error = None
    try:
        yield
    except InputError as caught:
        error = caught
    for reason in current_mesh().gather_from_all(None if error is None else str(error)):
        if reason is not None:
            raise InputError(reason) from error


def reason_of(error: BaseException) -> str:
    """The error's message as one line. For PyTorch's error of several ranks it is the first failed rank's message."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return "another rank failed and has the reason"
        rank, failure = next(iter(error.failures.items()))
        return (f"rank {rank}: " if current_mesh().world_size > 1 else "") + _text(failure[0])
    return _text(error)


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    # If the system writes fewer bytes, the message of PyTorch's archive writer only names its own source location.
    return "a file could not be written whole; is the disk full?" if "inline_container" in text else text


def on_rank0(path: Path, act: Any) -> None:
    """Run ``act`` on rank 0 while the other ranks wait; an ``OSError`` is raised on all ranks as ``InputError``."""
    error = None
    if current_mesh().rank == 0:
        try:
            act()
        except OSError as caught:
            error = caught
    raise_on_all(path, error)


def _cannot_write(path: Path, error: BaseException) -> InputError:
    return InputError(f"{path}: the checkpoint cannot be written ({reason_of(error)})")


def _copy_host_tensors(state: dict[str, Any]) -> None:
    """Copy host tensors, which training would otherwise change while the background thread writes them."""
    for part in nested_values(state):
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and torch.is_tensor(part.data) and part.data.is_cpu:
            part.data = part.data.detach().clone()
