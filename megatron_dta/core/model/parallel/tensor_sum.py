"""Sums over the ranks of a tensor group for decoding passes, capturable in CUDA graphs.

A decoding pass has two sums a layer, of a few hundred kilobytes each, so their latency counts and not their bandwidth.
Where the GPUs of the group can read each other's memory, a rank writes its term into a buffer that all ranks have
mapped, and a single kernel reads all terms (``one_shot_all_reduce`` of PyTorch's symmetric memory). It adds them in the
order of the ranks, so all ranks get the same bits, every time. The kernel waits for all ranks at its start, before it
reads their terms, and at its end, after which the buffer may be written again. It only reads peer memory and does not
use NVLink's multicast.

Larger sums, other dtypes, GPUs without access to each other and CPUs use ``torch.distributed.all_reduce``.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from dta_kernels.invariant.products import is_batch_invariant, product

logger = logging.getLogger(__name__)

# A rank reads the terms of all others, while NCCL's ring moves less than two. NCCL needs some 20 microseconds for the
# smallest sum, in which a GPU reads about this much over NVLink.
_MOST_BYTES_READ = 4 * 2**20
# Only these types have a kernel; its units are 16 bytes.
_DTYPES, _UNIT_BYTES = (torch.bfloat16, torch.float32), 16
_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class TensorSum:
    """Sums over the ranks of ``group``, which must all make the same calls; without autograd.

    Attributes:
        reads_peers: whether small sums read the other ranks' memory; None before the first sum.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.reads_peers: bool | None = None
        self._group, self._buffer = group, None

    def __call__(self, term: Tensor) -> Tensor:
        """The sum of every rank's ``term``, which may be overwritten."""
        shared = self._own_term(term.shape, term)
        if shared is None:
            torch.distributed.all_reduce(term, group=self._group)
            return term
        return _one_shot(shared.copy_(term), self._group)

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The sum of every rank's ``rows @ weight.T``."""
        shared = None if is_batch_invariant() else self._own_term((len(rows), len(weight)), rows)
        if shared is None:
            return self(product(rows, weight))
        return _one_shot(torch.mm(rows, weight.t(), out=shared), self._group)

    def _own_term(self, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """This rank's part of the buffer for a term of ``shape``; None if the sum does not read peer memory."""
        if self.reads_peers is None:
            self._buffer = _meet_peers(self._group, like.device)
            self.reads_peers = self._buffer is not None
        count = torch.Size(shape).numel()
        size = count * like.element_size()
        if self._buffer is None or like.dtype not in _DTYPES or not 0 < size <= len(self._buffer) or size % _UNIT_BYTES:
            return None
        return self._buffer.view(like.dtype)[:count].view(shape)


def _one_shot(term: Tensor, group: ProcessGroup) -> Tensor:
    return torch.ops.symm_mem.one_shot_all_reduce(term, "sum", group.group_name)


def _meet_peers(group: ProcessGroup, device: torch.device) -> Tensor | None:
    """A buffer that all ranks of ``group`` have mapped, uint8; None on all ranks if one of them cannot map it."""
    size = group.size()
    if device.type != "cuda" or size == 1:
        return None
    from torch.distributed import _symmetric_memory as symmetric_memory  # registers the kernels' names

    locations = _gathered((socket.gethostname(), device.index), group)
    buffer, reason = None, _why_apart(locations, device.index)
    if _agreed(reason, group) is None:
        try:
            with _without_multicast():
                most = _MOST_BYTES_READ // (size - 1) // _UNIT_BYTES * _UNIT_BYTES
                buffer = symmetric_memory.empty(most, dtype=torch.uint8, device=device)
                symmetric_memory.rendezvous(buffer, group)
        except Exception as error:  # of the driver, the store, or a PyTorch without this API
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    reason = _agreed(reason, group)
    if reason is None:
        reason = _agreed(_why_wrong(buffer, group), group)
    if reason is None:
        return buffer
    if group.rank() == 0:
        logger.warning("sums over the tensor group use all_reduce instead of peer memory: %s", reason)
    return None


def _why_apart(locations: list[tuple[str, int]], local_device: int) -> str | None:
    """Why this rank's GPU cannot read those of the others, of which ``locations`` lists host and device."""
    if len({host for host, _ in locations}) > 1:
        return "its ranks are on several hosts"
    if len(set(locations)) < len(locations):
        return "its ranks do not see each other's GPUs"
    others = [device for _, device in locations if device != local_device]
    if max(others) >= torch.cuda.device_count() or not all(
        torch.cuda.can_device_access_peer(local_device, i) for i in others
    ):
        return "its GPUs cannot access each other's memory"
    return None


def _why_wrong(buffer: Tensor, group: ProcessGroup) -> str | None:
    """Run the kernel once on known numbers."""
    term = buffer.view(torch.float32)[:_UNIT_BYTES].fill_(float(group.rank() + 1))
    total = _one_shot(term, group)
    ranks = group.size()
    return None if total.eq(ranks * (ranks + 1) / 2).all() else "a sum of known numbers was wrong"


def _gathered(value: object, group: ProcessGroup) -> list:
    values = [value] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def _agreed(reason: str | None, group: ProcessGroup) -> str | None:
    """The first reason of any rank; None if none has one."""
    return next((rank_reason for rank_reason in _gathered(reason, group) if rank_reason is not None), None)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep PyTorch from binding the buffer to a multicast object, which it does even if no kernel uses multicast. Not
    all hosts support these objects, and jobs on the other GPUs of a host may depend on the same switches."""
    before = os.environ.get(_MULTICAST_OFF)
    os.environ[_MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST_OFF]
        else:
            os.environ[_MULTICAST_OFF] = before


_tensor_sum: TensorSum | None = None


def tensor_sum() -> TensorSum:
    """The sum over this rank's tensor group, one for all layers: they use its buffer one after the other."""
    global _tensor_sum
    if _tensor_sum is None:
        _tensor_sum = TensorSum(parallel_state.get_tensor_model_parallel_group())
    return _tensor_sum


def forget_tensor_sum() -> None:
    """Discard the sum, so that another mesh gets its own."""
    global _tensor_sum
    _tensor_sum = None
