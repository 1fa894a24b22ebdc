"""The activation function of Megatron's feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dta.core.config import ModelConfig


def steady_silu(x: Tensor) -> Tensor:
    """SiLU on a CPU whose bits do not depend on an element's place, as PyTorch's do past the last whole vector."""
    return x / (1 + torch.exp(-x))


def squared_relu(x: Tensor) -> Tensor:
    """The square of ReLU."""
    return F.relu(x).square()


def activation_of(model: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The activation function of a model's feed-forward layers."""
    if model.swiglu:
        return F.silu
    return squared_relu if model.squared_relu else F.gelu


def is_swiglu(config: TransformerConfig) -> bool:
    """Whether the activation is ``silu(gate) * up``, without limits and offsets, which the kernels support."""
    plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0
    return config.gated_linear_unit and config.activation_func is F.silu and plain


def weighted_activation(first: Tensor, weight: Tensor, config: TransformerConfig) -> Tensor:
    """The input of an expert's second product: the activation of its ``first`` product times the rows' ``weight`` [R].

    Uses the operations and roundings of Megatron's ``MLP``.
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
