"""What all layers of a model can share while they go through the same segment: buffers, tensor descriptors, launchers.

Making one of them takes the host about as long as launching a kernel, and for all layers of a segment they are the
same. A buffer that is shared is overwritten by every layer in turn, so nothing may keep it until the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Made = TypeVar("Made")


class SharedByLayers:
    """Things by name, made when they are first asked for; they live as long as this object."""

    def __init__(self) -> None:
        self._made: dict[object, object] = {}

    def get(self, name: object, make: Callable[[], Made]) -> Made:
        """What ``make`` has returned for this name the first time."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = make()
        return made

    def of_tensor(self, name: object, x: Tensor, make: Callable[[Tensor], Made]) -> Made:
        """The same for what describes a tensor in its place in memory, of one shape for a name: it has ``base``."""
        made = self._made.get(name)
        if made is None or made.base.data_ptr() != x.data_ptr():
            made = self._made[name] = make(x)
        return made
