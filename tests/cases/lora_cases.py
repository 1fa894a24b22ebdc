"""Models with LoRA adapters for the tests: weights whose B is not zero, so that both matrices have a gradient."""

import torch

from megatron_dta.core.config import ModelConfig
from tree_engine_cases import model_config, weights_of

LORA = {"lora_rank": 3, "lora_alpha": 5.0}


def lora_config(dtype: torch.dtype = torch.float64, **settings: object) -> ModelConfig:
    """A small model with adapters."""
    return model_config(dtype, **{**LORA, **settings})


def lora_weights(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights of ``model`` with every B drawn, and what is frozen and begins as zero or one everywhere."""
    weights = {name: values.clone() for name, values in weights_of(model, seed).items()}
    generator = torch.Generator().manual_seed(seed + 1)
    for name, values in weights.items():
        if name.endswith(("lora_B", "bias")) or "norm" in name:
            values.add_(torch.empty(values.shape).normal_(0, 0.3, generator=generator))
    return weights


def is_adapter(name: str) -> bool:
    return "_adapter." in name
