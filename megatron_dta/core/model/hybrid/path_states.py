"""How a layer with a recurrence reaches the states of its tokens' paths, whichever pass it runs in.

A layer calls two operations of its pass: the short convolution of its rows and the recurrence of its inputs. Both see
each token after the tokens of its path, also those of earlier passes. Training on a tree segment (``segment_states``)
is such a pass.

Legend: N tokens of the pass, C channels, W width of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dta_kernels.recurrence.contract import Recurrence, Runs


class RecurrentShape(NamedTuple):
    """What a layer keeps at a fork.

    Attributes:
        state: shape of a state, such as [value heads, key size, value size].
        channels: C.
        width: W.
    """

    state: tuple[int, ...]
    channels: int
    width: int

    def divided(self, ranks: int) -> RecurrentShape:
        """The same for each of ``ranks`` that divide the heads, the first dimension of a state."""
        return RecurrentShape((self.state[0] // ranks, *self.state[1:]), self.channels // ranks, self.width)


class PathStates(Protocol):
    """The operations of a pass that need more than the tokens of the pass."""

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """``silu`` of the causal convolution of every token with its W - 1 predecessors, [N, C].

        Args:
            layer_number: 1-based number of the layer.
        """

    def recur(self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Output [N, ...] of ``recurrence`` for ``inputs`` [N, ...], each token after its path."""


class WholeSequence:
    """A pass over one whole sequence, before which there is nothing, through ``layers`` of a model."""

    def __init__(self, layers: Mapping[int, RecurrentShape]) -> None:
        self._layers = layers

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        channels, width = weight_CW.shape
        padded = functional.pad(rows_NC.t(), (width - 1, 0))
        return functional.silu(functional.conv1d(padded, weight_CW.unsqueeze(1), bias_C, groups=channels)).t()

    def recur(self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        entry = torch.zeros(1, *self._layers[layer_number].state, dtype=dtype, device=inputs[0].device)
        return recurrence(tuple(inputs), entry, Runs.of_lengths([len(inputs[0])], entry.device))[0]


class NoTokens:
    """A pass over no tokens, in which every parameter gets a gradient of zero."""

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        return rows_NC + weight_CW.sum(1) + (0 if bias_C is None else bias_C)

    def recur(self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        values = inputs[2]
        return values + sum(tokens.sum() for tokens in inputs)
