"""Draws tokens from logits with the kernels, so that samplers need not import them."""

from __future__ import annotations

from torch import Tensor


def draw_by_kernels(logits_BV: Tensor, noise_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token of each row (int64 [B]) and its logprob (float32 [B]), see ``dta_kernels.logprobs.draw_tokens``."""
    # Triton is installed wherever this is called.
    from dta_kernels.logprobs.draw_tokens import draw_tokens

    return draw_tokens(logits_BV, noise_B, temperature)
