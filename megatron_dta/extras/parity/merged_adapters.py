"""Trains LoRA in the stock model by another way than the tree model: the adapted weight itself is ``W + scale * B A``.

PyTorch computes this weight at each use and passes its gradient to A and B. Nothing is added to any output, so the
linear layers run as in full training. One process only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from megatron_dta.core.config import ModelConfig

_ADAPTER = "_adapter.lora_"
_PARAMETRIZED = ".parametrizations.weight.0.lora_"


class _WithAdapter(torch.nn.Module):
    """W -> W + scale * B A."""

    def __init__(self, first: Tensor, second: Tensor, scale: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B = torch.nn.Parameter(first.clone()), torch.nn.Parameter(second.clone())
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.lora_B @ self.lora_A)


def load_merged(stock: torch.nn.Module, weights: dict[str, Tensor], model: ModelConfig) -> None:
    """Load a tree model's ``weights`` into ``stock``: its own weights are frozen, and only adapters are trained."""
    stock.load_state_dict({name: values for name, values in weights.items() if _ADAPTER not in name})
    stock.requires_grad_(False)
    for name, first in weights.items():
        if name.endswith(f"{_ADAPTER}A"):
            linear = name.removesuffix(f"{_ADAPTER}A")
            second = weights[f"{linear}{_ADAPTER}B"]
            adapted = _WithAdapter(first, second, model.lora_alpha / model.lora_rank)
            parametrize.register_parametrization(stock.get_submodule(linear), "weight", adapted)


def unmerged_name(name: str) -> str:
    """The tree model's name of a parameter of ``stock``."""
    return name.replace(_PARAMETRIZED, _ADAPTER)
