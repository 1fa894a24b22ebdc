"""Converts between whole weights (or gradients) and their tensor-parallel shards, by Megatron's rules.

The embedding, the output weight, the query-key-value projection and the first feed-forward matrix are divided by rows,
and the matrices that follow them by columns; the rest is the same on every rank. A gated first matrix holds gate and up
projection one below the other, and a rank has its part of each. For tests: checkpoints are resharded by Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dta.config import ModelConfig

_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
_ROWS += ("linear_qkv_adapter.lora_B", "linear_fc1_adapter.lora_B")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight", "linear_proj_adapter.lora_A", "linear_fc2_adapter.lora_A")


def shard_weights(whole: dict[str, Tensor], model: ModelConfig, rank: int, size: int) -> dict[str, Tensor]:
    """The shards that tensor-parallel rank ``rank`` of ``size`` holds of ``whole``, the weights of one process."""
    return {name: _part(name, tensor, model, rank, size).contiguous() for name, tensor in whole.items()}


def join_shards(shards: Sequence[dict[str, Tensor]], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of ``shard_weights``; raises ``ValueError`` if ranks differ in what should be the same on all."""
    return {name: _joined(name, [shard[name] for shard in shards], model) for name in shards[0]}


def _part(name: str, tensor: Tensor, model: ModelConfig, rank: int, size: int) -> Tensor:
    if name.endswith(_VOCABULARY):
        missing = model.padded_vocab_size_on(size) - tensor.shape[0]
        return F.pad(tensor, (0, 0, 0, missing)).chunk(size)[rank]
    if name.endswith(_COLUMNS):
        return tensor.chunk(size, dim=1)[rank]
    if not name.endswith(_ROWS):
        return tensor
    halves = tensor.chunk(2) if _is_gated(name, model) else (tensor,)
    return torch.cat([half.chunk(size)[rank] for half in halves])


def _joined(name: str, parts: list[Tensor], model: ModelConfig) -> Tensor:
    if name.endswith(_VOCABULARY):
        return torch.cat(parts)[: model.padded_vocab_size]
    if name.endswith(_COLUMNS):
        return torch.cat(parts, dim=1)
    if name.endswith(_ROWS):
        halves = [part.chunk(2) if _is_gated(name, model) else (part,) for part in parts]
        return torch.cat([torch.cat(half) for half in zip(*halves, strict=True)])
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise ValueError(f"{name} is not the same on every rank")
    return parts[0]


def _is_gated(name: str, model: ModelConfig) -> bool:
    return model.swiglu and "linear_fc1" in name
