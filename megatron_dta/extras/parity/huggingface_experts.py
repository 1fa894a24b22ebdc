"""Converts layers with experts to Hugging Face's names.

transformers 4 keeps every expert's kinds separate; transformers 5 stacks those of a layer.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

_EXPERT = re.compile(r"(?P<layer>.*\.(mlp|mixer)\.experts)\.(?P<expert>\d+)\.(?P<kind>\w+)\.weight")
_KINDS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def experts_are_stacked() -> bool:
    """Whether the installed transformers stores a layer's experts in two tensors."""
    import transformers

    return int(transformers.__version__.split(".")[0]) >= 5


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` under a checkpoint's names in the memory layout of transformers 5: two tensors a layer of experts."""
    stacked: dict[str, Tensor] = {}
    of_layers: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        parts = _EXPERT.fullmatch(name)
        if parts is None:
            stacked[name] = tensor
        else:
            of_expert = of_layers.setdefault(parts["layer"], {}).setdefault(int(parts["expert"]), {})
            of_expert[_KINDS[parts["kind"]]] = tensor
    for layer, experts in of_layers.items():
        ordered = [experts[expert] for expert in range(len(experts))]
        if "gate" in ordered[0]:
            both = [torch.cat([kinds["gate"], kinds["up"]]) for kinds in ordered]
            stacked[f"{layer}.gate_up_proj"] = torch.stack(both)
        else:
            stacked[f"{layer}.up_proj"] = torch.stack([kinds["up"] for kinds in ordered])
        stacked[f"{layer}.down_proj"] = torch.stack([kinds["down"] for kinds in ordered])
    return stacked
