"""Supervised fine-tuning: the negative logprob of every trained token."""

from __future__ import annotations

from torch import Tensor

from megatron_dta.core.objectives.fields import LossFields, TokenLosses, masked


def sft_loss(logprobs: Tensor, entropy: Tensor, fields: LossFields) -> TokenLosses:
    """loss_t = -logprobs_t, all of shape [..., T]. Advantages and old logprobs are not used."""
    return TokenLosses(-masked(logprobs, fields.loss_mask), {"entropy": masked(entropy.detach(), fields.loss_mask)})
