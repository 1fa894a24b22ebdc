"""A K/V pool whose keys, values and gradient accumulators are on the host for some of the layers.

A layer needs its K and V only while it computes, and one segment needs those of its path only. Layers on the host share
two buffers on the device, with the slots of a whole layer each. While a layer computes in one buffer, the path of the
next layer on the host is copied into the other one, and what the layer before it wrote is copied back:

    ascending (forward)     in: K and V of the ancestors                          out: K and V of the segment
    descending (backward)   in: K and V of path and segment, and their gradients  out: gradients of the ancestors

Copies in and out run on a stream each and wait for events only, never for the host. The kernels see the slots that they
would see without offloading, so results are the same bit for bit. On a CPU, copies run at once.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from mmap import PAGESIZE
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.attention.kv_pool import KVPool, LayerSlots, SlotRuns, zero_slots
from megatron_dta.core.planning.costs.segment_bytes import NUM_BUFFERS, layers_on_host

FLAG = "--kv-offload-fraction"


class PinnedMemory:
    """Host memory that CUDA has registered, until the object is deleted.

    CUDA registers whole pages, and none twice. Other memory may share the first and the last page of a tensor, and
    freed memory may be given out again, so the memory has pages of its own and is unregistered before it is freed.

    Attributes:
        bytes: uint8, at least ``num_bytes``.

    Raises:
        MemoryError: the memory cannot be pinned.
    """

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // PAGESIZE) * PAGESIZE
        # Not by pin_memory, which rounds sizes up to a power of two.
        buffer = torch.empty(size + PAGESIZE, dtype=torch.uint8)
        self.bytes = buffer[-buffer.data_ptr() % PAGESIZE :][:size]
        address = self.bytes.data_ptr()
        if size and int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")  # otherwise another launch would report the error
            raise MemoryError
        self.free = weakref.finalize(self, _unregister if size else int, address)
        self.free.atexit = False

    def __len__(self) -> int:
        return len(self.bytes)


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # copies from and to this memory are over
    torch.cuda.cudart().cudaHostUnregister(address)


class HostSlots:
    """Host memory for the pools of a model, kept from pass to pass, and the streams that copy.

    Pinning takes about a second for a few GiB, so memory is pinned once and again only if a pass needs more.
    """

    def __init__(self, fraction: float, device: torch.device) -> None:
        self.fraction, self.is_cuda = fraction, device.type == "cuda"
        self._memory: dict[int, Tensor | PinnedMemory] = {}
        self.inward = torch.cuda.Stream(device) if self.is_cuda else None
        self.outward = torch.cuda.Stream(device) if self.is_cuda else None

    def pool(self, chunk: int, **sizes: Any) -> OffloadedKVPool:
        """The pool of a model chunk; ``sizes`` are those of ``KVPool``."""
        return OffloadedKVPool(self, chunk, **sizes)

    def memory(self, chunk: int, num_bytes: int) -> Tensor:
        """``num_bytes`` bytes for a model chunk's pool; pinned for a GPU."""
        memory = self._memory.get(chunk)
        if memory is None or len(memory) < num_bytes:
            if isinstance(memory, PinnedMemory):
                memory.free()
            self._memory.pop(chunk, None)
            del memory
            try:
                memory = PinnedMemory(num_bytes) if self.is_cuda else torch.empty(num_bytes, dtype=torch.uint8)
            except MemoryError:
                raise InputError(
                    f"{FLAG} {self.fraction:g}: {num_bytes / 2**30:.1f} GiB of host memory cannot be pinned; lower it"
                ) from None
            self._memory[chunk] = memory
        return (memory.bytes if isinstance(memory, PinnedMemory) else memory)[:num_bytes]


@dataclass(eq=False)
class _Buffer:
    """A layer's slots on the device, and what they hold.

    Attributes:
        loaded, used, stored: events after the last copy in, the last kernel and the last copy out; None before those.
    """

    slots: LayerSlots
    layer: int = -1
    runs: SlotRuns | None = None
    has_own_keys: bool = False
    has_gradients: bool = False
    loaded: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None
    stored: torch.cuda.Event | None = None

    def take(self, layer: int, runs: SlotRuns) -> None:
        """Give up what it holds for another layer or segment."""
        self.layer, self.runs = layer, runs
        self.has_own_keys = self.has_gradients = False


@dataclass
class _Traversal:
    """A pass through a model chunk's layers for one segment.

    Attributes:
        gradient_runs: slots of path and segment, each with whether descendants left gradients there.
    """

    runs: SlotRuns
    descending: bool
    gradient_runs: list[tuple[slice, bool]] = field(default_factory=list)


class OffloadedKVPool(KVPool):
    """A ``KVPool`` with the given share of its layers on the host.

    One segment's traversal at a time: ``begin`` before each, then ``layer`` and ``finish`` for each layer.
    """

    def __init__(self, host: HostSlots, chunk: int, num_layers: int, **sizes) -> None:
        self._offloaded = layers_on_host(num_layers, host.fraction)
        num_buffers = min(NUM_BUFFERS, len(self._offloaded))
        resident = [layer for layer in range(num_layers) if layer not in self._offloaded]
        super().__init__(num_layers=len(resident) + num_buffers, **sizes)
        self._row = {layer: row for row, layer in enumerate(resident)}
        self._buffers = [_Buffer(slots) for slots in self.layers[len(resident) :]]
        self._host = host
        self._on_host = dict(zip(self._offloaded, self._host_layers(chunk), strict=True))
        # For each slot, whether a descendant has added gradients. Between two ops, this is the same in all layers.
        self._has_gradients = np.zeros(sizes["num_slots"], dtype=bool)
        self._written: dict[int, torch.cuda.Event] = {}
        self._now: _Traversal | None = None
        if host.is_cuda:
            host.inward.wait_stream(torch.cuda.current_stream())

    def _host_layers(self, chunk: int) -> list[LayerSlots]:
        """Each offloaded layer's slots on the host."""
        if not self._offloaded:
            return []
        like = [tensor for tensor in self._buffers[0].slots if tensor is not None]
        sizes = [len(self._offloaded) * tensor.numel() * tensor.element_size() for tensor in like]
        # One part a tensor and not a layer: without slots, the parts of later layers would not be aligned.
        parts = self._host.memory(chunk, sum(sizes)).split(sizes)
        views = [part.view(t.dtype).view(len(self._offloaded), *t.shape) for part, t in zip(parts, like, strict=True)]
        return [LayerSlots(*of_layer, *[None] * (4 - len(of_layer))) for of_layer in zip(*views, strict=True)]

    def open(self, slots: slice) -> None:
        resident = len(self._row)
        self._has_gradients[slots] = False
        if self.grad_keys_LSGD is not None:
            zero_slots(self.grad_keys_LSGD[:resident], self.grad_values_LSGD[:resident], slots)

    def begin(self, runs: SlotRuns, descending: bool) -> None:
        self._now = _Traversal(runs, descending)
        if descending:
            self._now.gradient_runs = _by_flag([*runs.ancestors, runs.segment], self._has_gradients)
            for run in runs.ancestors:
                self._has_gradients[run] = True
        if self._offloaded:
            self._fetch(self._offloaded[-1 if descending else 0])

    def layer(self, layer: int) -> LayerSlots:
        if layer in self._row:
            return self.layers[self._row[layer]]
        buffer = self._fetch(layer)
        if buffer.loaded is not None:
            torch.cuda.current_stream().wait_event(buffer.loaded)
        following = self._offloaded.index(layer) + (-1 if self._now.descending else 1)
        if 0 <= following < len(self._offloaded):
            self._fetch(self._offloaded[following], current=buffer)
        return buffer.slots

    def finish(self, layer: int, gradients: bool) -> None:
        if layer in self._row:
            return
        buffer = next(held for held in self._buffers if held.layer == layer and held.runs is self._now.runs)
        if self._host.is_cuda:
            buffer.used = torch.cuda.current_stream().record_event()
        runs, on_host = self._now.runs, self._on_host[layer]
        if gradients:
            copies = [(on_host.grad_keys, buffer.slots.grad_keys), (on_host.grad_values, buffer.slots.grad_values)]
            self._store(buffer, copies, runs.ancestors)
            buffer.has_gradients = False
            return
        buffer.has_own_keys = True
        # A recomputed forward writes the same K and V again.
        if layer not in runs.stored:
            runs.stored.add(layer)
            self._store(
                buffer, [(on_host.keys, buffer.slots.keys), (on_host.values, buffer.slots.values)], [runs.segment]
            )

    def close(self) -> None:
        if self._host.is_cuda:
            torch.cuda.current_stream().wait_stream(self._host.inward)
            torch.cuda.current_stream().wait_stream(self._host.outward)

    def _store(self, buffer: _Buffer, copies: list[tuple[Tensor, Tensor]], slots: list[slice]) -> None:
        """Copy slots of a buffer to the host after the kernels that wrote them."""
        if self._host.is_cuda:
            self._host.outward.wait_event(buffer.used)
        with torch.cuda.stream(self._host.outward):
            for host, device in copies:
                for run in slots:
                    host[run].copy_(device[run], non_blocking=True)
        if self._host.is_cuda:
            buffer.stored = self._written[buffer.layer] = self._host.outward.record_event()

    def _fetch(self, layer: int, current: _Buffer | None = None) -> _Buffer:
        """The buffer with a layer's slots for the traversal; begins to copy what it lacks.

        Args:
            current: the buffer in use, which keeps its layer.
        """
        now = self._now
        buffer = next((held for held in self._buffers if held.layer == layer and held.runs is now.runs), None)
        is_taken = buffer is None
        if is_taken:
            buffer = next(held for held in self._buffers if held is not current)
            # The order of the list is that of their last use.
            buffer.take(layer, now.runs)
            keys = list(now.runs.ancestors)
        else:
            keys = []
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        if now.descending and not buffer.has_own_keys:
            keys.append(now.runs.segment)
            buffer.has_own_keys = True
        gradients = now.gradient_runs if now.descending and not buffer.has_gradients else []
        buffer.has_gradients |= now.descending
        # Without copies in, too, a kernel must not write to a buffer that is still copied out.
        if is_taken or keys or gradients:
            self._load(buffer, keys, gradients)
        return buffer

    def _load(self, buffer: _Buffer, keys: list[slice], gradients: list[tuple[slice, bool]]) -> None:
        inward, on_host, slots = self._host.inward, self._on_host[buffer.layer], buffer.slots
        if self._host.is_cuda:
            for event in (buffer.used, buffer.stored, self._written.get(buffer.layer)):
                if event is not None:
                    inward.wait_event(event)
        with torch.cuda.stream(inward):
            for run in keys:
                slots.keys[run].copy_(on_host.keys[run], non_blocking=True)
                slots.values[run].copy_(on_host.values[run], non_blocking=True)
            for run, has_gradients in gradients:
                for to, source in ((slots.grad_keys, on_host.grad_keys), (slots.grad_values, on_host.grad_values)):
                    to[run].copy_(source[run], non_blocking=True) if has_gradients else to[run].zero_()
        if self._host.is_cuda:
            buffer.loaded = inward.record_event()


def _by_flag(runs: list[slice], flags: np.ndarray) -> list[tuple[slice, bool]]:
    """The runs, divided where the flag of their slots changes."""
    pieces = []
    for run in runs:
        run_flags = flags[run]
        bounds = [0, *(np.flatnonzero(np.diff(run_flags)) + 1).tolist(), len(run_flags)]
        pairs = pairwise(bounds)
        pieces += [(slice(run.start + a, run.start + b), bool(run_flags[a])) for a, b in pairs if b > a]
    return pieces
