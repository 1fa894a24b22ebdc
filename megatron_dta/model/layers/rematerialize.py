"""Outputs of cheap ops are not kept for the backward pass: their memory is freed and filled again when it is needed.

A linear layer keeps its input for the gradient by its weight. Where the input is a norm's output, or SwiGLU's, or
rotated queries, one pass over memory makes it again, out of what is kept anyway. So the storage of the tensor is
emptied after the layer's forward, and a hook on the gradient by the layer's output, which comes right before the
layer's own backward, fills it again with the same bits. Whatever has kept the tensor or a view of it sees the same
storage, so it does not matter how the layer is made (tensor parallelism, weight gradients straight into a buffer,
adapters). PyTorch's ``saved_tensors_hooks`` would do it for PyTorch's own ops, but a layer that finds its weight
through them gets a copy without the attributes by which gradients are accumulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Refill = Callable[[Tensor], None]


def mark_recomputable(tensor: Tensor, refill: Refill) -> Tensor:
    """Say that ``refill(tensor)`` can write ``tensor``'s values into it again; returns ``tensor``.

    ``refill`` must not hold ``tensor`` itself, and must not wait for a gradient.
    """
    if tensor.requires_grad:
        tensor.refill = refill
    return tensor


def call_without_keeping_input(layer: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """``layer(tensor)``, whose first output is differentiable; a marked ``tensor`` is not kept until the backward.

    Nothing but the layer may read ``tensor`` after this.
    """
    result = layer(tensor)
    refill = getattr(tensor, "refill", None)
    if refill is not None:
        empty_until_backward(tensor, result[0] if isinstance(result, tuple) else result, refill)
    return result


def empty_until_backward(tensor: Tensor, output: Tensor, refill: Refill) -> None:
    """Free ``tensor``'s storage until the gradient by ``output`` arrives.

    Args:
        tensor: has its storage for itself.
        output: what was computed from it; where it takes no gradient, nothing is done.
        refill: writes the same values into the tensor that it is given, which shares the storage.
    """
    if not output.requires_grad:
        return
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    # Taken out when used: the graph outlives the backward of its layers, and would hold every tensor until its end.
    waiting = [(tensor.data, refill)]

    @torch.no_grad()
    def restore(_: Tensor) -> None:
        if waiting:
            values, write = waiting.pop()
            values.untyped_storage().resize_(size)
            write(values)

    output.register_hook(restore)
    storage.resize_(0)
