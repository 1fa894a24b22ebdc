"""Follows every storage that an op makes from its birth to its end."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_dta.core.planning.pipeline.schedule import PipelineOp


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made since it was entered and still are there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        for tensor in tree_leaves((arguments, keywords)):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), 0)
        outputs = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return outputs

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        """What an op reads and was not made since then counts as nothing."""
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage), size
        self.live += size
        if self.live > self.most:
            gc.collect(1)  # what Triton's interpreter has left in cycles; others are looked for between ops
            self.most = max(self.most, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]

    @property
    def filled(self) -> int:
        """Bytes of the storages that are there and were not emptied (``rematerialize``)."""
        return sum(storage().nbytes() for storage, size in self._known.values() if size)


@dataclass
class Weighed:
    """Of an op: bytes that it left, those of them that are not emptied, and the most above what was before."""

    left: int
    filled: int
    peak: int


class Scales:
    """In place of the engine's clock."""

    def __init__(self, mode: LiveBytes) -> None:
        self.mode, self.ops = mode, {}

    @contextmanager
    def measure(self, op: PipelineOp) -> Iterator[None]:
        gc.collect()
        before, filled = self.mode.live, self.mode.filled
        self.mode.most = before
        yield
        # Triton's interpreter holds what it has run on in cycles.
        gc.collect()
        self.ops[op.kind, op.segment] = Weighed(
            self.mode.live - before, self.mode.filled - filled, self.mode.most - before
        )
