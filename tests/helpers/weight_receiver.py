"""The receiving side of weight transfer, as the local servers have it: groups on gloo, and buckets of bytes."""

import atexit
import base64
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_dta.extras.servers.weights.groups import SharedBuffer, StoreGroup

TIMEOUT = timedelta(seconds=20)


class IdGroup(StoreGroup):
    """A group on gloo that servers join by a unique id, which like NCCL's is 128 bytes and says where the root is."""

    def __init__(self, world_size: int, towards: str, timeout_s: float) -> None:
        super().__init__(world_size, towards, timeout_s)
        where = f"{self.meeting.address} {self.meeting.port} {self.meeting.name}"
        self.meeting = replace(self.meeting, unique_id=where.encode().ljust(128))


class FileBuffer(SharedBuffer):
    """A buffer in a file that servers map, in place of one on a GPU; it begins as garbage."""

    def __init__(self, world_size: int, towards: str, timeout_s: float) -> None:
        del towards, timeout_s
        super().__init__(world_size, [torch.device("cpu")])

    def _allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        with NamedTemporaryFile(delete=False) as file:
            file.write(b"\xff" * num_bytes)
        atexit.register(Path(file.name).unlink)
        self._file = file.name
        return torch.from_file(file.name, True, num_bytes, dtype=torch.uint8)

    def _export(self, buffer: Tensor) -> tuple[str, tuple[Any, ...]]:
        return "GPU-0", (self._file, buffer.numel())

    def abort(self) -> None:
        for buffer, _ in self._buffers:
            buffer.fill_(255)
        super().abort()


def place_in(unique_id: str) -> tuple[str, int, str]:
    """Address, port and name in the base64 of such an id."""
    content = base64.b64decode(unique_id, validate=True)
    assert len(content) == 128
    address, port, name = content.decode().split()
    return address, int(port), name


OPENERS = {"vllm": IdGroup, "sglang": StoreGroup}


class WeightReceiver:
    """A server's processes, each with its own rank in a group with the trainer.

    Attributes:
        received: tensors of the update so far; None outside of one.
        groups: number of groups joined so far.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes, self.groups = processes, 0
        self.received: dict[str, Tensor] | None = None
        self._members: list[dist.ProcessGroupGloo] = []
        self._threads = ThreadPoolExecutor(processes)

    def join(self, address: str, port: int, name: str, rank_offset: int, world_size: int) -> None:
        def member(process: int) -> dist.ProcessGroupGloo:
            store: Any = dist.TCPStore(address, port, world_size, is_master=False, timeout=TIMEOUT, use_libuv=False)
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, rank_offset + process, world_size, TIMEOUT)

        # A group that another one takes the place of would keep its memory.
        assert not self._members, "still in a group"
        self._members = list(self._threads.map(member, range(self.processes)))
        self.groups += 1

    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]], most_bytes: int | None) -> None:
        """One broadcast of all tensors as bytes, as SGLang does, or several of more than ``most_bytes``, as vLLM."""
        tensors = [(n, getattr(torch, d), s) for n, d, s in zip(names, dtypes, shapes, strict=True)]
        while tensors:
            count, size = 0, 0
            while count < len(tensors) and (most_bytes is None or size <= most_bytes):
                size += math.prod(tensors[count][2]) * tensors[count][1].itemsize
                count += 1
            self._receive_bytes(tensors[:count], size)
            tensors = tensors[count:]

    def map(self, names: list[str], dtypes: list[str], shapes: list[list[int]], sizes: list[int], handles: Any) -> None:
        """Copy all tensors out of a buffer that the trainer has filled."""
        path, num_bytes = handles["GPU-0"]
        buffer, start = torch.from_file(path, True, num_bytes, dtype=torch.uint8), 0
        for name, dtype, shape, size in zip(names, dtypes, shapes, sizes, strict=True):
            assert name not in self.received, f"{name} came twice"
            self.received[name] = buffer[start : start + size].clone().view(getattr(torch, dtype)).view(shape)
            start += size

    def _receive_bytes(self, tensors: list[tuple[str, torch.dtype, list[int]]], size: int) -> None:
        buffer, start = self._broadcast(size), 0
        for name, dtype, shape in tensors:
            end = start + math.prod(shape) * dtype.itemsize
            assert name not in self.received, f"{name} came twice"
            self.received[name] = buffer[start:end].view(dtype).view(shape).clone()
            start = end

    def _broadcast(self, size: int) -> Tensor:
        def receive(member: dist.ProcessGroupGloo) -> Tensor:
            buffer = torch.full((size,), 255, dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            member.broadcast([buffer], options).wait(TIMEOUT)
            return buffer

        buffers = list(self._threads.map(receive, self._members))
        assert all(torch.equal(buffers[0], buffer) for buffer in buffers)
        return buffers[0]

    def leave(self) -> None:
        members, self._members = self._members, []
        for member in members:
            member.abort()
