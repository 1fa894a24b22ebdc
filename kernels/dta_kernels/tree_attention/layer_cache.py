"""Caches the objects that all layers share for one segment: buffers, tensor descriptors, launchers.

Making one of them takes the host about as long as launching a kernel, and they are the same for all layers of a
segment. Every layer overwrites a shared buffer in turn, so its contents must not be needed in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Made = TypeVar("Made")


class SharedByLayers:
    """Objects by name, made at the first request; they live as long as this cache."""

    def __init__(self) -> None:
        self._made: dict[object, object] = {}

    def get(self, name: object, make: Callable[[], Made]) -> Made:
        """The object that ``make`` returned at the first request for this name."""
        cached = self._made.get(name)
        if cached is None:
            cached = self._made[name] = make()
        return cached

    def of_tensor(self, name: object, x: Tensor, make: Callable[[Tensor], Made]) -> Made:
        """Like ``get``, for a descriptor (with ``base``) of ``x``; one shape, layout and dtype for each name.

        It is moved from tensor to tensor, because it is read at a launch and checking a new one takes longer.
        """
        cached = self._made.get(name) or self._made.setdefault(name, make(x))
        cached.base = x
        return cached
