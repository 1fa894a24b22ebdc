"""The activation function of Megatron's feed-forward layers, as their settings describe it."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def is_swiglu(config: TransformerConfig) -> bool:
    """Whether it is ``silu(gate) * up``, without limits and offsets, for which there are kernels."""
    plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0
    return config.gated_linear_unit and config.activation_func is F.silu and plain


def weighted_activation(first: Tensor, weight: Tensor, config: TransformerConfig) -> Tensor:
    """What an expert's second product reads: the activation of its ``first`` one times the rows' ``weight`` [R].

    The operations and roundings of Megatron's ``MLP``.
    """
    if config.gated_linear_unit:
        gate, up = first.chunk(2, dim=-1)
        limit = config.activation_func_clamp_value
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        active = config.activation_func(gate) * (up + config.glu_linear_offset)
    else:
        active = config.activation_func(first)
    return (active * weight.unsqueeze(-1)).to(active.dtype)
