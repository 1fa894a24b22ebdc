"""Moves tensors to the host and back by their storages, so that views and references to them stay valid.

Megatron's parameters are views of one buffer, its optimizer holds references to parts of it, and the engine holds the
parameters. Replacing tensors would break these links. Here the storage of a tensor is emptied and filled again, and
every view of it sees the old values at the old place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostStorages:
    """The storages of some tensors, on the device or on the host.

    Args:
        tensors: tensors whose storages move; a storage that several of them share moves once.
        keep: copy the values to the host and back. Without it the storages are filled with zeros on their return, for
            buffers that are cleared anyway.
        constant: the values never change, so that one copy on the host serves for good.
    """

    def __init__(self, tensors: Iterable[Tensor], keep: bool = True, constant: bool = False) -> None:
        self._keep, self._constant = keep, constant
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
        self._bytes = [
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for tensor in storages.values()
        ]
        self._sizes = [view.numel() for view in self._bytes]
        self._copies: list[Tensor] | None = None
        self.on_device = True

    def to_host(self) -> None:
        """Free the storages on the device."""
        if not self.on_device:
            return
        if self._keep and not (self._constant and self._copies is not None):
            self._copies = [_host_copy(view) for view in self._bytes]
        for view in self._bytes:
            view.untyped_storage().resize_(0)
        self.on_device = False

    def to_device(self) -> None:
        """Allocate the storages again and restore their values."""
        if self.on_device:
            return
        for index, (view, size) in enumerate(zip(self._bytes, self._sizes, strict=True)):
            view.untyped_storage().resize_(size)
            if self._keep:
                view.copy_(self._copies[index], non_blocking=True)
            else:
                view.zero_()
        if not self._constant:
            if self._bytes and self._bytes[0].is_cuda:
                torch.cuda.synchronize()  # the copies below are read until then
            self._copies = None
        self.on_device = True


def _host_copy(view: Tensor) -> Tensor:
    # Copies from and to pinned memory are asynchronous and faster.
    host = torch.empty(view.shape, dtype=view.dtype, device="cpu", pin_memory=view.is_cuda)
    return host.copy_(view)
