"""Frees the outputs of cheap ops after the forward and recomputes them when the backward needs them.

A linear layer keeps its input for the gradient of its weight. If that input is the output of a norm or of SwiGLU, or
rotated queries, one pass over memory can recompute it from tensors that are kept anyway. The storage of the tensor is
therefore emptied after the layer's forward. A hook on the gradient of the layer's output runs right before the layer's
own backward and writes the same bits into the storage again. Every reference to the tensor or to a view of it shares
this storage, so the implementation of the layer does not matter (tensor parallelism, weight gradients written directly
to a buffer, adapters). PyTorch's ``saved_tensors_hooks`` would suffice for PyTorch's own ops, but a layer that saves
its weight through them gets a copy without the attributes by which gradients are accumulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Refill = Callable[[Tensor], None]


def mark_recomputable(tensor: Tensor, refill: Refill) -> Tensor:
    """Declare that ``refill(tensor)`` restores the values of ``tensor``; returns ``tensor``.

    ``refill`` must not hold a reference to ``tensor``, and must not wait for a gradient.
    """
    if tensor.requires_grad:
        tensor.refill = refill
    return tensor


def call_without_keeping_input(layer: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """``layer(tensor)``, whose first output is differentiable; a marked ``tensor`` is not kept until the backward.

    Only the layer may read ``tensor`` after this call.
    """
    result = layer(tensor)
    refill = getattr(tensor, "refill", None)
    if refill is not None:
        empty_until_backward(tensor, result[0] if isinstance(result, tuple) else result, refill)
    return result


def empty_until_backward(tensor: Tensor, output: Tensor, refill: Refill) -> None:
    """Free ``tensor``'s storage until the gradient of ``output`` arrives.

    Args:
        tensor: a tensor that shares its storage with no other one.
        output: a result computed from it; if it requires no gradient, nothing is done.
        refill: writes the same values into its argument, a tensor that shares the storage.
    """
    if not output.requires_grad:
        return
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    # Removed on use: the graph outlives the backward of its layers, and would hold every tensor until its end.
    waiting = [(tensor.data, refill)]

    @torch.no_grad()
    def restore(_: Tensor) -> None:
        if waiting:
            values, write = waiting.pop()
            values.untyped_storage().resize_(size)
            write(values)

    output.register_hook(restore)
    storage.resize_(0)
