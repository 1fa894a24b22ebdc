"""Cases and helpers that tests of direct layer share."""

from __future__ import annotations

import torch

from megatron_dta.config import ModelConfig
from tree_engine_cases import (
    model_config,
)


def fused(dtype: torch.dtype = torch.float32, **settings: object) -> ModelConfig:
    return model_config(dtype, **settings, fused_layer_impl="triton")
