"""Defines the outcome of training a batch, in the same form for the engine and for every reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """Loss, logprobs and gradients of one batch.

    Attributes:
        loss: the batch's loss.
        logprobs: per sequence, [T] in the model's precision; 0 where a token is not trained.
        gradients: by parameter name.
    """

    loss: float
    logprobs: list[np.ndarray]
    gradients: dict[str, Tensor]
