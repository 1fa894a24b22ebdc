"""How a layer with a recurrence reaches the states of its tokens' paths, whichever pass it runs in.

A layer calls two operations of its pass: the short convolution of its rows and the recurrence of its inputs. Both see
each token behind the tokens of its path, also those of earlier passes. Training on a tree segment (``segment_states``)
and a whole sequence by itself (``WholeSequence``) are two passes for one layer. Gated delta net is the first such
layer; KDA and Mamba-2 need the same two operations.

Legend: N tokens of the pass, C channels, W width of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dta_kernels.recurrence.contract import Recurrence, Runs
from dta_kernels.recurrence.reference import short_convolution_by_token
from dta_kernels.tree_attention.reference import accumulation_dtype


class RecurrentShape(NamedTuple):
    """What a layer keeps at a fork.

    Attributes:
        state: shape of a state on this rank, such as [value heads, key size, value size].
        channels: C.
        width: W.
    """

    state: tuple[int, ...]
    channels: int
    width: int


class PathStates(Protocol):
    """The operations of a pass that need more than the tokens of the pass."""

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor) -> Tensor:
        """``silu`` of the causal convolution of every token with its W - 1 predecessors, [N, C].

        Args:
            layer_number: 1-based number of the layer.
        """

    def recur(
        self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor], state: tuple[int, ...]
    ) -> Tensor:
        """Output [N, ...] of ``recurrence`` for ``inputs`` [N, ...], each token behind its path.

        Args:
            state: shape of a state.
        """


class NoTokens:
    """A pass over no tokens, in which every parameter gets a gradient of zero."""

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor) -> Tensor:
        return rows_NC + weight_CW.sum(1)

    def recur(
        self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor], state: tuple[int, ...]
    ) -> Tensor:
        values = inputs[2]
        return values + sum(each.sum() for each in inputs)


class WholeSequence:
    """A pass over one whole sequence, from its first token on."""

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor) -> Tensor:
        before = rows_NC.new_zeros(weight_CW.shape[1] - 1, rows_NC.shape[1])
        return short_convolution_by_token(rows_NC, weight_CW, before)[0]

    def recur(
        self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor], state: tuple[int, ...]
    ) -> Tensor:
        first = inputs[0]
        entry = torch.zeros(1, *state, dtype=accumulation_dtype(first.dtype), device=first.device)
        return recurrence(tuple(inputs), entry, Runs.of_lengths([first.shape[0]], first.device))[0]
