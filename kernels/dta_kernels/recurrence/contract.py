"""The contract of a linear recurrence that can run on trees.

A recurrence reads tokens in order and carries a state of fixed size. A *run* is a piece of a path without a branch. The
state before its first token is the run's *entry*, the state after its last token its *exit*. A tree needs nothing else:
the exit of a run is the entry of each of its children, and the gradient by an exit is the sum of the gradients by its
children's entries. Gated delta net is one such recurrence; KDA and Mamba-2 have the same form.

Legend: T tokens of all runs, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Runs that lie one behind the other in their inputs.

    Attributes:
        offsets: R + 1 offsets of the runs, from 0 to T, on the host; no run is empty.
        on_device: the same as int64 [R + 1] on the inputs' device.
    """

    offsets: tuple[int, ...]
    on_device: Tensor

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Runs:
        """Runs of these lengths."""
        offsets = (0, *accumulate(lengths))
        return cls(offsets, torch.tensor(offsets, dtype=torch.int64).to(device, non_blocking=True))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each run."""
        return [end - begin for begin, end in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


class Recurrence(Protocol):
    """A recurrence whose operations autograd can differentiate by the inputs and by the entries."""

    def __call__(self, inputs: tuple[Tensor, ...], entry: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
        """``(output [T, ...], exits [R, *state])``.

        Args:
            inputs: tensors [T, ...] of the tokens.
            entry: [R, *state], in at least float32; the exits have its shape and dtype.
        """
