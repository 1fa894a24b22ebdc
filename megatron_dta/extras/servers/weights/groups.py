"""Process groups that the trainer's first rank shares with the processes of inference servers.

The trainer is rank 0 and sends; every process of a server has a rank of its own and receives. There are two ways to
meet, which ``Meeting`` describes to the servers:

- ``StoreGroup``: a store on the trainer, as ``torch.distributed`` uses it. SGLang meets this way, on NCCL or gloo.
- ``NcclGroup``: an NCCL unique id that is passed on. vLLM meets this way.

Processes on the trainer's own GPUs need no group; they read the trainer's buffer (``SharedBuffer``).

The groups are independent of the trainer's own. All methods block and may be called from any thread, one at a time.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

_POLL_S = 0.0005


@dataclass(frozen=True)
class Meeting:
    """How a server's processes join a group.

    Attributes:
        world_size: processes of the group, the trainer included.
        backend: "nccl", "gloo" or "ipc".
        name: names the group in the store.
        address, port: of the store.
        unique_id: NCCL's id of the group, 128 bytes, instead of a store.
        handles: of a buffer that the servers read: by the UUID of a GPU, what ``rebuild_cuda_tensor`` takes.
    """

    world_size: int
    backend: str
    name: str = ""
    address: str = ""
    port: int = 0
    unique_id: bytes | None = None
    handles: Mapping[str, tuple[Any, ...]] | None = None


class SharedGroup(ABC):
    """A group with the processes of servers, in which this process has rank 0.

    Attributes:
        meeting: what the servers need to join; valid before ``join``.
        device: from which buffers are sent.
        sends_many: whether others may be told of several buffers at once.
    """

    meeting: Meeting
    device = torch.device("cpu")
    sends_many = True

    def reserve(self, num_bytes: int) -> None:  # noqa: B027
        """Prepare for buffers of up to ``num_bytes``; call before ``join``."""

    def begin(self) -> None:  # noqa: B027
        """Prepare for an update."""

    def stage(self, buffer: Tensor) -> None:  # noqa: B027
        """Prepare a buffer before the other members are informed, if they are informed of one at a time."""

    @abstractmethod
    def join(self) -> None:
        """Join, and wait for all others."""

    @abstractmethod
    def broadcast(self, buffer: Tensor) -> None:
        """Send a buffer on the host (uint8) to all others and wait until it is sent."""

    def broadcast_all(self, buffers: Sequence[Tensor]) -> None:
        """Send buffers one after another."""
        for buffer in buffers:
            self.broadcast(buffer)

    @abstractmethod
    def abort(self) -> None:
        """Leave the group at once; a waiting call of another thread raises. May be called twice."""


class StoreGroup(SharedGroup):
    """A group of ``torch.distributed`` that is formed through a store in this process.

    Args:
        towards: URL of a server; the store's address is the one from which this machine reaches it.
        device: where NCCL sends from; None for gloo.
    """

    def __init__(self, world_size: int, towards: str, timeout_s: float, device: torch.device | None = None) -> None:
        self._timeout, self._device = timedelta(seconds=timeout_s), device
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._store = dist.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=self._timeout, use_libuv=False
        )
        backend = "gloo" if device is None else "nccl"
        name = f"weights-{uuid.uuid4().hex[:8]}"
        self.meeting = Meeting(world_size, backend, name, _address_towards(towards), self._store.port)
        self._group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None

    def join(self) -> None:
        # The prefixes under which torch.distributed's own constructor of such groups keeps its keys.
        store = dist.PrefixStore(self.meeting.name, self._store)
        store = dist.PrefixStore(f"{self.meeting.name}/", store)
        store = dist.PrefixStore("cpu/" if self._device is None else "cuda/", store)
        if self._device is None:
            self._group = dist.ProcessGroupGloo(store, 0, self.meeting.world_size, self._timeout)
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 10 * self._timeout  # ``_wait`` is first
        with _errors_are_not_fatal():
            self._group = dist.ProcessGroupNCCL(store, 0, self.meeting.world_size, options)

    def broadcast(self, buffer: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._device is None:
            self._group.broadcast([buffer], options).wait(self._timeout)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            values = buffer.to(self._device, non_blocking=True)
            self._group.broadcast([values], options).wait()
            _wait(self._stream.record_event(), self._timeout)

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class NcclGroup(SharedGroup):
    """A communicator of NCCL that is formed by its unique id, as vLLM's weight transfer has it since 0.33.

    torch makes no communicator from an id that others chose, so this one is made by nccl4py, NVIDIA's binding of NCCL.
    """

    def __init__(self, world_size: int, timeout_s: float, device: torch.device) -> None:
        from nccl import core as nccl

        self._nccl = nccl
        self._timeout, self._device = timedelta(seconds=timeout_s), device
        self.device = device
        self._unique_id = nccl.get_unique_id()
        self.meeting = Meeting(world_size, "nccl", unique_id=bytes(self._unique_id))
        self._communicator: nccl.Communicator | None = None
        # Memory that one stream has freed is not used by another, so each update has the same buffers.
        self._copies, self._sends = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def join(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._sends):
            self._communicator = self._nccl.Communicator.init(self.meeting.world_size, 0, self._unique_id)
            # The servers begin with the sum of one element.
            number = torch.zeros(1, device=self._device)
            self._communicator.allreduce(number, number, self._nccl.SUM, stream=self._sends.cuda_stream)
            _wait(self._sends.record_event(), self._timeout)

    def broadcast(self, buffer: Tensor) -> None:
        self.broadcast_all([buffer])

    def broadcast_all(self, buffers: Sequence[Tensor]) -> None:
        # While a buffer is sent from one staging buffer, the next one is copied from the host to the other.
        largest = max(buffer.numel() for buffer in buffers)
        with torch.cuda.device(self._device):
            with torch.cuda.stream(self._copies):
                staging = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in buffers[:2]]
            sent: list[torch.cuda.Event] = []
            for index, buffer in enumerate(buffers):
                if index >= len(staging):
                    _wait(sent[index - len(staging)], self._timeout)
                values = staging[index % 2][: buffer.numel()]
                with torch.cuda.stream(self._copies):
                    values.copy_(buffer, non_blocking=True)
                self._sends.wait_stream(self._copies)
                self._communicator.broadcast(values, values, root=0, stream=self._sends.cuda_stream)
                sent.append(self._sends.record_event())
            _wait(sent[-1], self._timeout)

    def abort(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


class SharedBuffer(SharedGroup):
    """A buffer on each GPU of this machine that holds processes of servers, which map it and copy from it (CUDA IPC).

    It is as large as the largest bucket and stays for the run. Every update has handles of its own, which each process
    opens once and closes when it has finished: torch counts this, and keeps memory whose reader has died.

    Args:
        devices: the GPUs; a server's process reads the buffer of its own.
    """

    sends_many = False

    def __init__(self, world_size: int, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._buffers: list[tuple[Tensor, torch.cuda.Stream | None]] = []
        self.meeting = Meeting(world_size, "ipc")

    def reserve(self, num_bytes: int) -> None:
        for device in self._devices:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            self._buffers.append((self._allocate(num_bytes, device), stream))

    def begin(self) -> None:
        self.meeting = replace(self.meeting, handles=dict(self._export(buffer) for buffer, _ in self._buffers))

    def stage(self, buffer: Tensor) -> None:
        for target, stream in self._buffers:
            with torch.cuda.stream(stream):
                target[: buffer.numel()].copy_(buffer, non_blocking=True)
        for _, stream in self._buffers:
            if stream is not None:
                stream.synchronize()

    def join(self) -> None:
        """Nothing to wait for: each server reads on its own."""

    def broadcast(self, buffer: Tensor) -> None:
        """Nothing to send: the servers read what was staged."""

    def abort(self) -> None:
        self._buffers.clear()

    def _allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _export(self, buffer: Tensor) -> tuple[str, tuple[Any, ...]]:
        """The UUID of the buffer's GPU, and a new handle of the buffer."""
        return str(torch.cuda.get_device_properties(buffer.device).uuid), reduce_tensor(buffer)[1]


GroupOpener = Callable[[int, str, float], SharedGroup]
"""Opens a group, given its world size, the URL of one of the servers, and a timeout in seconds."""


def group_opener(backend: str, by_unique_id: bool) -> GroupOpener:
    """How groups on ``backend`` ("nccl", "gloo" or "ipc") are opened.

    Args:
        by_unique_id: servers join groups of NCCL by their unique id.
    """

    def open_group(world_size: int, url: str, timeout_s: float) -> SharedGroup:
        if backend == "gloo":
            return StoreGroup(world_size, url, timeout_s)
        device = torch.device("cuda", torch.cuda.current_device())
        if backend == "ipc":
            # A lone process is on this GPU, several may be on any.
            every = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
            return SharedBuffer(world_size, [device] if world_size == 2 else every)
        if by_unique_id:
            return NcclGroup(world_size, timeout_s, device)
        return StoreGroup(world_size, url, timeout_s, device)

    return open_group


def _wait(done: torch.cuda.Event, timeout: timedelta) -> None:
    """Wait for an event; unlike a synchronization, this ends after ``timeout``."""
    end = time.monotonic() + timeout.total_seconds()
    while not done.query():
        if time.monotonic() > end:
            raise TimeoutError(f"the servers did not receive the weights within {timeout.total_seconds():g} s")
        time.sleep(_POLL_S)


def _address_towards(url: str) -> str:
    """The address of this machine from which it reaches the host of ``url``; nothing is sent."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


@contextmanager
def _errors_are_not_fatal() -> Iterator[None]:
    """Groups made inside do not end the process when one of the others dies."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
