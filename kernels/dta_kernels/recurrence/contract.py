"""The contract of a linear recurrence that can run on trees.

A recurrence reads tokens in order and carries a state of fixed size. A *run* is a piece of a path without a branch. The
state before its first token is the run's *entry*, the state after its last token its *exit*. A tree needs nothing else:
the exit of a run is the entry of each of its children, and the gradient of an exit is the sum of the gradients of its
children's entries. Gated delta net is one such recurrence; KDA and Mamba-2 have the same form.

Legend: T tokens of all runs, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Tokens of a chunk, in which recurrences compute with products of matrices.
CHUNK = 64


class Runs(NamedTuple):
    """Runs that follow one another in their inputs.

    Attributes:
        offsets: R + 1 offsets of the runs, from 0 to T, on the host; no run is empty.
        on_device: the same as int64 [R + 1] on the inputs' device.
        chunks: int64 [B, 2] there: for each chunk of ``CHUNK`` tokens, its run and its number in the run.
    """

    offsets: tuple[int, ...]
    on_device: Tensor
    chunks: Tensor

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Runs:
        """Runs of these lengths. Nothing waits for the device."""
        offsets = (0, *accumulate(lengths))
        chunks = [(run, chunk) for run, length in enumerate(lengths) for chunk in range(-(-length // CHUNK))]
        on_gpu = torch.device(device).type == "cuda"
        tensors = (torch.tensor(array, dtype=torch.int64, pin_memory=on_gpu) for array in (offsets, chunks))
        return cls(offsets, *(tensor.to(device, non_blocking=True) for tensor in tensors))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each run."""
        return [end - begin for begin, end in pairwise(self.offsets)]


class Recurrence(Protocol):
    """A recurrence whose operations autograd can differentiate with respect to the inputs and the entries."""

    def __call__(self, inputs: tuple[Tensor, ...], entry: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
        """``(output [T, ...], exits [R, *state])``.

        Args:
            inputs: tensors [T, ...] of the tokens.
            entry: [R, *state], in at least float32; the exits have its shape and dtype.
        """
