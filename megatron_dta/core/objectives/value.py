"""Computes the critic's loss (PPO, arXiv 1707.06347): squared error to the returns, clipped around the old values.

The value of a token is that of the state before it. With V the critic's value, V_old the value before the first step on
the rollout batch, and R the return:

    max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.objectives.fields import LossFields, TokenLosses, masked


def value_loss(values: Tensor, unused: Tensor, fields: LossFields, *, value_clip: float | None = 0.2) -> TokenLosses:
    """Loss per token [..., T]; ``fields`` has ``returns``, with a clip also ``old_values``.

    Metrics: value, return, the second moments that ``explained_variance`` needs, and value_clip_fraction.
    """
    if fields.returns is None or (value_clip is not None and fields.old_values is None):
        raise InputError("the critic's loss needs returns and old values")
    mask = fields.loss_mask
    present, returns = masked(values, mask), masked(fields.returns.to(values.dtype), mask)
    loss, cut = (present - returns).square(), torch.zeros_like(mask)
    if value_clip is not None:
        old = masked(fields.old_values.to(values.dtype), mask)
        change = present - old
        clipped = (old + change.clamp(-value_clip, value_clip) - returns).square()
        # Within the bounds both losses are equal except for rounding, which must not count as clipped.
        cut = (change.abs() > value_clip) & (clipped > loss)
        loss = torch.where(cut, clipped, loss)
    error = (present - returns).detach()
    metrics = {
        "value": present.detach(),
        "return": returns,
        "value_clip_fraction": cut.to(present.dtype),
        "value_error": error,
        "squared_value_error": error.square(),
        "squared_return": returns.square(),
    }
    return TokenLosses(loss / 2, {name: masked(metric, mask) for name, metric in metrics.items()})


def explained_variance(means: dict[str, float]) -> float:
    """1 - var(R - V) / var(R) from the metrics of ``value_loss``; 0 if all returns are equal."""
    variance = means["squared_return"] - means["return"] ** 2
    # A difference of equal numbers below rounding is not variance.
    if variance <= 1e-12 * max(1.0, means["squared_return"]):
        return 0.0
    return 1 - (means["squared_value_error"] - means["value_error"] ** 2) / variance
