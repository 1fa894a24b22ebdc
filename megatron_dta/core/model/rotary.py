"""Computes rotary frequencies with the scalings that published models use: linear, Llama 3's and YaRN.

Megatron-Core computes them too, but with fixed frequency factors and original length for Llama 3, and in another order
of operations than Hugging Face transformers. An angle is position x frequency, so at position 100,000 the last bit of a
float32 frequency is 0.006 radians: only if the bits agree does a model see the positions that it was trained with. The
frequencies are therefore computed here on the CPU, as transformers and inference servers compute them, and passed to
Megatron's rotary embedding. Its table of angles stays float32 for models of every precision.

Sources: Chen et al. 2023 (arXiv:2306.15595) and kaiokendev for linear scaling, Grattafiori et al. 2024
(arXiv:2407.21783) and Meta's reference code for Llama 3's, Peng et al. 2023 (arXiv:2309.00071) for YaRN.
"""

from __future__ import annotations

import math

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dta.core.config import ModelConfig


def set_frequencies(gpt: GPTModel, model: ModelConfig) -> None:
    """Set the frequencies of ``model`` in a freshly built ``gpt``; its table of angles must not have been used yet."""
    gpt.rotary_pos_emb.inv_freq = inverse_frequencies(model)
    # Megatron would cut the table into shares of a context group; here a pass's positions index the whole table.
    gpt.rotary_pos_emb.cp_group = None


def set_attention_factor(config: TransformerConfig, model: ModelConfig) -> None:
    """Set YaRN's factor on cosine and sine in the configuration that Megatron's attention reads."""
    if model.position_embedding_type == "yarn":
        config.yarn_rotary_scaling_factor = model.rotary_scaling_factor
        config.yarn_mscale = model.mscale
        config.yarn_mscale_all_dim = model.mscale_all_dim


def rotary_tables(angles: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [n, R / 2], of Megatron's ``angles`` [n, 1, 1, R], which contain every angle twice.

    They include YaRN's attention factor, as Megatron's attention applies it.
    """
    once = angles.flatten(1)[:, : angles.shape[-1] // 2].float()
    factor = _yarn_get_concentration_factor_from_config(config)
    cos, sin = once.cos(), once.sin()
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def inverse_frequencies(model: ModelConfig) -> Tensor:
    """Radians per position of every pair of rotated channels: float32 [rotated channels / 2], on the CPU."""
    base = _powers(model).reciprocal()
    if model.position_embedding_type == "none":
        # Rotation by an angle of zero, which changes no bit.
        return torch.zeros_like(base)
    if model.position_embedding_type == "yarn":
        return _yarn(model)
    if model.use_rope_scaling:
        return _llama3(base, model)
    if model.rotary_seq_len_interpolation_factor is not None:
        return base / model.rotary_seq_len_interpolation_factor
    return base


def _powers(model: ModelConfig) -> Tensor:
    """Positions per radian, before any scaling."""
    channels = model.rotated_channels
    return model.rotary_base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)


def _llama3(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """Divide frequencies with few turns over the original length, keep those with many, and blend between them."""
    length = model.rope_scaling_original_max_position_embeddings
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    wavelength = 2 * math.pi / frequencies
    divided = frequencies / model.rope_scaling_factor
    kept_part = (length / wavelength - low) / (high - low)
    blended = (1 - kept_part) * frequencies / model.rope_scaling_factor + kept_part * frequencies
    # The bounds are compared as wavelengths, and both ends belong to the blend, as in the reference code.
    scaled = torch.where(wavelength < length / high, frequencies, blended)
    return torch.where(wavelength > length / low, divided, scaled)


def _yarn(model: ModelConfig) -> Tensor:
    """Like ``_llama3``, with a linear ramp over the channels from ``beta_fast`` turns over the original length to
    ``beta_slow`` turns.
    """
    channels, powers = model.rotated_channels, _powers(model)
    first, last = _channel_of(model.yarn_beta_fast, model), _channel_of(model.yarn_beta_slow, model)
    if not model.no_yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    if first == last:
        last += 0.001  # the ramp needs a width; this is the usual one
    ramp = ((torch.arange(channels // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept_part = 1 - ramp
    divided = (model.rotary_scaling_factor * powers).reciprocal()
    return divided * (1 - kept_part) + powers.reciprocal() * kept_part


def _channel_of(turns: float, model: ModelConfig) -> float:
    """Index of the channel pair with this number of turns over the original length."""
    length = model.yarn_original_max_position_embeddings
    return model.rotated_channels * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))
