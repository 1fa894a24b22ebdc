"""Rows of other trainers' batches, and the place of their trained tokens in the trainers' outputs.

Outputs of verl, AReaL and slime agree in one point: position t of a row holds the logprob of token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A sequence and its trained tokens.

    Attributes:
        token_ids: int64 [T].
        loss_mask: bool [T], False at position 0, which nothing predicts.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray

    @property
    def order(self) -> tuple[bytes, bytes]:
        """A key that orders rows by content, so that the order of a mini-batch has no effect on its plan."""
        return self.token_ids.astype(">i8").tobytes(), self.loss_mask.tobytes()


class Placement:
    """Where the trained tokens of a group's rows are in a rectangle [B, T] and in outputs of whole rows, joined [N].

    Attributes:
        offsets: int64 [B + 1], where each row begins in the joined outputs, on the device of ``like_BT``.
    """

    def __init__(self, rows: Sequence[Row], like_BT: Tensor) -> None:
        width, device = like_BT.shape[1], like_BT.device
        lengths = [len(row.token_ids) for row in rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        trained = [np.flatnonzero(row.loss_mask) for row in rows]
        cells = [b * width + np.arange(len(positions)) for b, positions in enumerate(trained)]
        edges = [start + trained_tokens - 1 for start, trained_tokens in zip(starts, trained, strict=False)]
        self._size = int(starts[-1])
        self._cells, self._places, self.offsets = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device, non_blocking=True)
            for parts in (cells, edges, [starts])
        )

    def join(self, values_BT: Tensor) -> Tensor:
        """The values as outputs of whole rows [N], 0 where a token is not trained."""
        return values_BT.new_zeros(self._size).index_copy(0, self._places, values_BT.reshape(-1)[self._cells])


def shifted(values: np.ndarray) -> np.ndarray:
    """Values [T] of tokens as an output of the row: each moves to the position before its token."""
    return np.append(values[1:], 0.0).astype(values.dtype)
