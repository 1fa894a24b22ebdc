"""Stores keys and values of the segments in flight, and the gradients of them that their descendants add.

A segment passes only K and V to its descendants, and they return only dK and dV. Both live in slots: a plan assigns a
run of slots to every segment from its forward to its backward. Nothing is therefore allocated within a step, and a
gather by slot numbers replaces concatenation. dK and dV accumulate in float32 (float64 for a float64 model), because
bfloat16 would lose small contributions to a token that many branches share.

Legend: L layers, S slots, G key/value heads on this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dta_kernels.tree_attention.reference import accumulation_dtype


def latent_size(config: TransformerConfig) -> int:
    """Channels of the latent and the key for positions that latent attention keeps of a token; 0 for other models."""
    return 0 if config.mixer is None else config.mixer.slot or 0


class SlotShape(NamedTuple):
    """What a rank keeps of a token in a layer: its key/value heads, and the channels of a key and of a value."""

    num_heads: int
    key_size: int
    value_size: int


class LayerSlots(NamedTuple):
    """One layer's part of a pool, [S, G, D] each; of latent attention, values have no channels."""

    keys: Tensor
    values: Tensor
    grad_keys: Tensor | None
    grad_values: Tensor | None


@dataclass(eq=False)
class SlotRuns:
    """The slots that a segment uses, as runs known to the host.

    Attributes:
        ancestors: slots of the root path in earlier segments.
        segment: slots of the segment.
        stored: layers whose K and V of the segment were copied to the host.
    """

    ancestors: list[slice]
    segment: slice
    stored: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, ancestor_slots: np.ndarray, segment: slice) -> SlotRuns:
        """The runs of the ancestors' slots, int64 [A]."""
        bounds = [0, *(np.flatnonzero(np.diff(ancestor_slots) != 1) + 1).tolist(), len(ancestor_slots)]
        pairs = pairwise(bounds) if len(ancestor_slots) else ()
        return cls([slice(int(ancestor_slots[a]), int(ancestor_slots[a]) + b - a) for a, b in pairs], segment)


def zero_slots(grad_keys_LSGD: Tensor, grad_values_LSGD: Tensor, slots: slice) -> None:
    """Zero the slots of all layers, some of them one by one: each is contiguous, written at the memory's speed."""
    both, all_slots = (grad_keys_LSGD, grad_values_LSGD), slice(0, grad_keys_LSGD.shape[1])
    parts = both if slots == all_slots else [layer[slots] for pool in both for layer in pool]
    if parts:
        torch._foreach_zero_(parts)


class KVPool:
    """``num_slots`` token slots for every layer.

    Attributes:
        keys_LSGD, values_LSGD: in the model's dtype.
        grad_keys_LSGD, grad_values_LSGD: accumulators in at least float32; None for forward-only passes.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        slot: SlotShape,
        dtype: torch.dtype,
        device: torch.device,
        with_gradients: bool,
    ) -> None:
        (num_heads, key_size, value_size), numbers = slot, (num_layers, num_slots)
        self.keys_LSGD = torch.empty(*numbers, num_heads, key_size, dtype=dtype, device=device)
        self.values_LSGD = torch.empty(*numbers, num_heads, value_size, dtype=dtype, device=device)
        self.grad_keys_LSGD = self.grad_values_LSGD = None
        if with_gradients:
            gradients = dict(dtype=accumulation_dtype(dtype), device=device)
            self.grad_keys_LSGD = torch.empty(*numbers, num_heads, key_size, **gradients)
            self.grad_values_LSGD = torch.empty(*numbers, num_heads, value_size, **gradients)

    @cached_property
    def layers(self) -> list[LayerSlots]:
        """Each layer's slots, as views."""
        tensors = (self.keys_LSGD, self.values_LSGD, self.grad_keys_LSGD, self.grad_values_LSGD)
        none = [None] * len(self.keys_LSGD)
        return [LayerSlots(*views) for views in zip(*(none if t is None else t.unbind() for t in tensors), strict=True)]

    @cached_property
    def gathered(self) -> tuple[Tensor, Tensor]:
        """Buffers for the keys and values [S, G, D] that one segment attends to in one layer."""
        return torch.empty_like(self.keys_LSGD[0]), torch.empty_like(self.values_LSGD[0])

    def open(self, slots: slice) -> None:
        """Prepare a segment's slots at its first forward: zero the gradients that its descendants will add to."""
        if self.grad_keys_LSGD is not None:
            zero_slots(self.grad_keys_LSGD, self.grad_values_LSGD, slots)

    def begin(self, runs: SlotRuns | None, descending: bool) -> None:
        """Begin a pass of one segment through the layers: descending in a backward, else ascending."""

    def layer(self, layer: int) -> LayerSlots:
        """A layer's slots on the device, valid until ``finish``."""
        return self.layers[layer]

    def finish(self, layer: int, gradients: bool) -> None:
        """A layer's kernels are launched; they wrote the ancestors' gradients, or else the segment's K and V."""

    def close(self) -> None:
        """All segments are done."""
