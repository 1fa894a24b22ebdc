"""Keeps states and convolution rows at open forks, and the gradients of them that later segments add.

It is to layers with a recurrence what ``attention.kv_pool`` is to attention. A fork has a slot from the forward of its
segment to the backward. States and all gradients are in float32 (float64 for a float64 model), because a state is read
by all tokens below it.

Legend: L layers, S slots, C channels and W width of the short convolution.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dta_kernels.tree_attention.reference import accumulation_dtype
from megatron_dta.core.model.hybrid.path_states import RecurrentShape


class StatePool:
    """``num_slots`` forks for each of the model chunk's ``layers`` with a recurrence, which have one shape.

    Attributes:
        shape: what a layer keeps at a fork.
        row_of_layer: index of a layer in the tensors, by its 1-based number.
        states: [L, S, *state].
        rows: the last W - 1 rows before the convolution, [L, S, W - 1, C] in the model's dtype.
        grad_states, grad_rows: accumulators; None for forward-only passes.
    """

    def __init__(
        self,
        layers: Mapping[int, RecurrentShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        with_gradients: bool,
    ) -> None:
        self.row_of_layer = {number: row for row, number in enumerate(layers)}
        self.shape = shape = next(iter(layers.values()), RecurrentShape((), 0, 1))
        self.dtype = accumulation_dtype(dtype)
        slots = (len(layers), num_slots)
        of_rows = (*slots, shape.width - 1, shape.channels)
        self.states = torch.empty(*slots, *shape.state, dtype=self.dtype, device=device)
        self.rows = torch.empty(of_rows, dtype=dtype, device=device)
        self.grad_states = torch.empty_like(self.states) if with_gradients else None
        self.grad_rows = torch.empty(of_rows, dtype=self.dtype, device=device) if with_gradients else None

    def open(self, slots: slice) -> None:
        """Zero the gradients of a segment's forks, to which later segments will add."""
        if self.grad_states is not None:
            self.grad_states[:, slots].zero_()
            self.grad_rows[:, slots].zero_()
