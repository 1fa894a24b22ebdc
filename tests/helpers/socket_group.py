"""Process groups of ranks on one machine, whose collectives are messages over local sockets in the calling thread.

Gloo hands each message from thread to thread: that was two fifths of the processor time of the tests on meshes. Here a
rank sends its part to the others at once and reads theirs when it waits. Sums are in the order of ranks, as all
ranks compute them. Ranks that call different collectives, or with tensors of other sizes, fail and say so.
"""

import ctypes
import pickle
import select
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

# PyTorch versions whose names of a group's methods are those below; others keep Gloo.
_TRIED_VERSIONS = ("2.13.",)
_HEAD = struct.Struct("=IQ")
_REDUCTIONS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.PRODUCT: torch.mul,
}
# A waiting thread looks this often whether another one has read what it waits for.
_LOOK_S = 0.1


def socket_pairs(world_size: int) -> list[dict[int, socket.socket]]:
    """For each rank its sockets, by the other's rank."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for low in range(world_size):
        for high in range(low + 1, world_size):
            ends[low][high], ends[high][low] = socket.socketpair()
    return ends


def use_sockets(ends: dict[int, socket.socket]) -> None:
    """Groups on the host, made from now on in this process, send messages over ``ends``."""
    if torch.__version__.startswith(_TRIED_VERSIONS):
        SocketGroup.links = _Links(ends)
        distributed_c10d.ProcessGroupGloo = SocketGroup


class _Links:
    """Messages to and from all other ranks; those with the same key arrive in the order in which they were sent."""

    def __init__(self, ends: dict[int, socket.socket]) -> None:
        self._ends, self._lock = ends, threading.RLock()
        self._unread = {rank: bytearray() for rank in ends}
        self._inbox: defaultdict[tuple[int, bytes], deque[bytes]] = defaultdict(deque)
        self._ranks = {end.fileno(): rank for rank, end in ends.items()}
        self._poll = select.poll()
        for end in ends.values():
            end.setblocking(False)
            self._poll.register(end, select.POLLIN)

    def send(self, rank: int, key: bytes, message: bytes) -> None:
        """Send a message. While the receiver's buffer is full, what arrives here is read, so that all go on."""
        rest = memoryview(b"".join((_HEAD.pack(len(key), len(message)), key, message)))
        with self._lock:
            while rest:
                try:
                    rest = rest[self._ends[rank].send(rest) :]
                except BlockingIOError:
                    select.select([], [self._ends[rank]], [], 0.001)
                    self._read(0)
                except OSError as error:
                    raise RuntimeError(f"Connection closed by peer: rank {rank} ({error})") from None

    def arrived(self, rank: int, key: bytes) -> bool:
        with self._lock:
            self._read(0)
            return bool(self._inbox.get((rank, key)))

    def receive(self, rank: int, key: bytes, timeout_s: float) -> bytes:
        """The next message of a rank with this key; RuntimeError if the rank has ended, or none comes in time."""
        sender, end = (rank, key), time.monotonic() + timeout_s
        while True:
            with self._lock:
                if messages := self._inbox.get(sender):
                    message = messages.popleft()
                    if not messages:
                        del self._inbox[sender]
                    return message
                if rank not in self._unread:
                    raise RuntimeError(f"Connection closed by peer: rank {rank} has ended")
            if time.monotonic() > end:
                raise RuntimeError(f"Timed out waiting {timeout_s:.0f} s for rank {rank}")
            self._poll.poll(1000 * _LOOK_S)
            self._read(0)

    def _read(self, timeout_s: float) -> None:
        with self._lock:
            for descriptor, _ in self._poll.poll(1000 * timeout_s):
                rank = self._ranks[descriptor]
                try:
                    part = self._ends[rank].recv(1 << 20)
                except BlockingIOError:
                    continue
                except OSError:
                    part = b""
                if part:
                    self._unread[rank] += part
                    self._sort(rank)
                else:
                    self._poll.unregister(descriptor)
                    del self._unread[rank]

    def _sort(self, rank: int) -> None:
        unread, begin = self._unread[rank], 0
        while len(unread) - begin >= _HEAD.size:
            key_length, length = _HEAD.unpack_from(unread, begin)
            body = begin + _HEAD.size + key_length
            if len(unread) < body + length:
                break
            self._inbox[rank, bytes(unread[begin + _HEAD.size : body])].append(bytes(unread[body : body + length]))
            begin = body + length
        del unread[:begin]


class _Work:
    """What a call returns: ``finish`` reads the others' parts as soon as the caller waits."""

    def __init__(self, finish: Callable[[], None] | None = None, is_there: Callable[[], bool] = lambda: True) -> None:
        self._finish, self._is_there = finish, is_there

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        if self._finish is not None and self._is_there():
            self.wait()
        return self._finish is None


class SocketGroup(ProcessGroup):
    """A group as Gloo would make it. Keys of messages name the group and count its collectives."""

    links: _Links

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.options = SimpleNamespace(group_name="", global_ranks_in_group=[])
        self._timeout_s, self._calls = timeout.total_seconds(), 0
        self._letters: Counter[tuple[str, int, int]] = Counter()
        self._own, self._others = rank, [other for other in range(size) if other != rank]

    def _set_sequence_number_for_group(self) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self.options.group_name

    def _global(self, rank: int) -> int:
        ranks = self.options.global_ranks_in_group
        return ranks[rank] if ranks else rank

    def _exchange(
        self, name: str, parts: dict[int, Tensor], sources: Sequence[int], use: Callable[[dict[int, bytes]], None]
    ) -> _Work:
        """Send ``parts`` by rank, and give to ``use`` what comes from ``sources``."""
        self._calls += 1
        key = f"{self.options.group_name}:{self._calls}".encode()
        for rank, part in parts.items():
            self.links.send(self._global(rank), key, pickle.dumps((name, _bytes(part))))

        def finish() -> None:
            received = {}
            for rank in sources:
                theirs, received[rank] = pickle.loads(self.links.receive(self._global(rank), key, self._timeout_s))
                if theirs != name:
                    raise RuntimeError(f"rank {rank} of the group calls {theirs} where rank {self._own} calls {name}")
            use(received)

        work = _Work(finish, lambda: all(self.links.arrived(self._global(rank), key) for rank in sources))
        if not sources:
            work.wait()
        return work

    def _to_all(self, name: str, tensor: Tensor, use: Callable[[list[Tensor]], None]) -> _Work:
        """Send ``tensor`` to all, and give to ``use`` the parts of all ranks in order."""

        def with_own(received: dict[int, bytes]) -> None:
            use([tensor if rank == self._own else _tensor(received[rank], tensor) for rank in range(self.size())])

        return self._exchange(name, dict.fromkeys(self._others, tensor), self._others, with_own)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        (tensor,) = tensors
        combine = _reduction(opts)
        return self._to_all("all_reduce", tensor, lambda parts: tensor.copy_(reduce(combine, parts)))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return _together([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        (tensor,) = tensors
        combine, root = _reduction(opts), opts.rootRank

        def use(parts: list[Tensor]) -> None:
            if self._own == root:
                tensor.copy_(reduce(combine, parts))

        return self._to_all("reduce", tensor, use)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        (parts_out,), (tensor,) = outputs, inputs
        return self._to_all("all_gather", tensor, lambda parts: _copy_each(parts_out, parts))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        _check_size(output.numel(), tensor.numel() * self.size())
        return self._to_all("all_gather_single", tensor, lambda parts: _copy_flat(output, parts))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return _together([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        (output,), (parts,) = outputs, inputs
        part, combine = parts[self._own], _reduction(opts)
        _check_size(output.numel(), part.numel())

        def use(received: dict[int, bytes]) -> None:
            every = [part if rank == self._own else _tensor(received[rank], part) for rank in range(self.size())]
            output.copy_(reduce(combine, every).view(output.shape))

        return self._exchange("reduce_scatter", {rank: parts[rank] for rank in self._others}, self._others, use)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Work:
        _check_size(tensor.numel(), output.numel() * self.size())
        return self.reduce_scatter([output], [list(tensor.reshape(self.size(), -1))], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        return _together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> _Work:
        sent = tensor.split(input_sizes or [len(tensor) // self.size()] * self.size())
        wanted = output.split(output_sizes or [len(output) // self.size()] * self.size())
        return self.alltoall(list(wanted), list(sent), opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        def use(received: dict[int, bytes]) -> None:
            outputs[self._own].copy_(inputs[self._own])
            _copy_each([outputs[rank] for rank in received], [_tensor(received[r], outputs[r]) for r in received])

        return self._exchange("all_to_all", {rank: inputs[rank] for rank in self._others}, self._others, use)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        (tensor,), root = tensors, opts.rootRank
        if self._own == root:
            return self._exchange("broadcast", dict.fromkeys(self._others, tensor), [], lambda _: None)
        return self._exchange("broadcast", {}, [root], lambda received: tensor.copy_(_tensor(received[root], tensor)))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Work:
        (tensor,), root = inputs, opts.rootRank
        if self._own != root:
            return self._exchange("gather", {root: tensor}, [], lambda _: None)
        (wanted,) = outputs

        def use(received: dict[int, bytes]) -> None:
            wanted[root].copy_(tensor)
            _copy_each([wanted[rank] for rank in received], [_tensor(part, tensor) for part in received.values()])

        return self._exchange("gather", {}, self._others, use)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Work:
        (output,), root = outputs, opts.rootRank
        if self._own == root:
            (parts,) = inputs
            to_others = {rank: parts[rank] for rank in self._others}
            return self._exchange("scatter", to_others, [], lambda _: output.copy_(parts[root]))
        return self._exchange("scatter", {}, [root], lambda received: output.copy_(_tensor(received[root], output)))

    def barrier(self, opts: Any = None) -> _Work:
        return self._to_all("barrier", torch.empty(0), lambda _: None)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> _Work:
        (tensor,) = tensors
        self.links.send(self._global(rank), self._letter("to", rank, tag), _bytes(tensor))
        return _Work()

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> _Work:
        (tensor,), source, key = tensors, self._global(rank), self._letter("from", rank, tag)
        receive = self.links.receive
        return _Work(
            lambda: tensor.copy_(_tensor(receive(source, key, self._timeout_s), tensor)),
            lambda: self.links.arrived(source, key),
        )

    def _letter(self, way: str, rank: int, tag: int) -> bytes:
        """The key of the next message to or from one rank."""
        self._letters[way, rank, tag] += 1
        return f"{self.options.group_name}:{tag}:letter {self._letters[way, rank, tag]}".encode()


def _reduction(opts: Any) -> Callable[[Tensor, Tensor], Tensor]:
    kind = ReduceOp.SUM if opts is None else opts.reduceOp
    for known, combine in _REDUCTIONS.items():
        if kind == known:
            return combine
    raise NotImplementedError(f"reduction {kind}")


def _bytes(tensor: Tensor) -> bytes:
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    # An array of NumPy would keep the storage from being resized ever after.
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _tensor(message: bytes, like: Tensor) -> Tensor:
    """The tensor of a message, of the shape and type of another one."""
    _check_size(len(message), like.numel() * like.element_size())
    if not message:
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(message), dtype=like.dtype).view(like.shape)


def _check_size(size: int, expected: int) -> None:
    if size != expected:
        raise RuntimeError(f"ranks have tensors of different sizes: {size} where {expected} is expected")


def _copy_each(outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part.view(output.shape))


def _copy_flat(output: Tensor, parts: Sequence[Tensor]) -> None:
    output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))


def _together(works: Sequence[_Work]) -> _Work:
    return _Work(lambda: [work.wait() for work in works], lambda: all(work.is_completed() for work in works))
