"""Converts between whole weights (or gradients) and their tensor-parallel shards, by Megatron's rules.

The embedding, the output weight, the query-key-value projection and the first feed-forward matrix are divided by rows,
and the matrices that follow them by columns; the rest is the same on every rank. A gated first matrix holds gate and up
projection one below the other, and a rank has its part of each. For tests: checkpoints are resharded by Megatron.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dta.core.config import ModelConfig

_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
_ROWS += ("linear_qkv_adapter.lora_B", "linear_fc1_adapter.lora_B")
_ROWS += ("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", ".D")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight", "linear_proj_adapter.lora_A", "linear_fc2_adapter.lora_A")
_ROWS += ("in_proj_adapter.lora_B",)
_COLUMNS += ("out_proj.weight", "out_proj_adapter.lora_A")
# Of latent attention; products down to latents are divided, too.
_LATENT = tuple(f"linear_{name}_proj" for name in ("q", "q_down", "q_up", "kv_down", "kv_up"))
_ROWS += tuple(f"{name}{part}" for name in _LATENT for part in (".weight", "_adapter.lora_B"))


def shard_weights(weights: dict[str, Tensor], model: ModelConfig, rank: int, size: int) -> dict[str, Tensor]:
    """The shards that tensor-parallel rank ``rank`` of ``size`` holds of ``weights``, the weights of one process."""
    return {name: _part(name, tensor, model, rank, size).contiguous() for name, tensor in weights.items()}


def join_shards(shards: Sequence[dict[str, Tensor]], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of ``shard_weights``; raises ``ValueError`` if ranks differ in what should be the same on all."""
    return {name: _joined(name, [shard[name] for shard in shards], model) for name in shards[0]}


def _part(name: str, tensor: Tensor, model: ModelConfig, rank: int, size: int) -> Tensor:
    if name.endswith(_VOCABULARY):
        missing = model.padded_vocab_size(size) - tensor.shape[0]
        return F.pad(tensor, (0, 0, 0, missing)).chunk(size)[rank]
    if name.endswith(_COLUMNS):
        return tensor.chunk(size, dim=1)[rank]
    if not _has_rows(name, model):
        return tensor
    return torch.cat([section.chunk(size)[rank] for section in _sections(name, tensor, model)])


def _joined(name: str, parts: list[Tensor], model: ModelConfig) -> Tensor:
    if name.endswith(_VOCABULARY):
        return torch.cat(parts)[: model.padded_vocab_size()]
    if name.endswith(_COLUMNS):
        return torch.cat(parts, dim=1)
    if _has_rows(name, model):
        sections = [_sections(name, part, model, len(parts)) for part in parts]
        return torch.cat([torch.cat(section) for section in zip(*sections, strict=True)])
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise ValueError(f"{name} is not the same on every rank")
    return parts[0]


def _has_rows(name: str, model: ModelConfig) -> bool:
    # A norm over all heads is divided, one that they share is not.
    is_divided = name.endswith("out_norm.weight") and model.mixer.norm_width > model.mixer.head_state[1]
    return name.endswith(_ROWS) or is_divided


def _sections(name: str, tensor: Tensor, model: ModelConfig, size: int = 1) -> tuple[Tensor, ...]:
    """The parts of a tensor (or of one of its ``size`` shards) that the ranks divide separately."""
    if model.swiglu and "linear_fc1" in name:
        return tensor.chunk(2)
    sections = getattr(model.mixer, "sections", {})
    inputs, filters = list(sections.values()), [sections[name] for name in sections and model.mixer.filtered]
    rows = {"in_proj.weight": inputs, "in_proj_adapter.lora_B": inputs, "conv1d": filters}
    rows_of = next((rows[part] for part in rows if part in name), None)
    return (tensor,) if rows_of is None else tensor.split([length // size for length in rows_of])


def name_in_whole_model(part: Any, name: str) -> str:
    """The name with the layer's and the expert's number in the whole model instead of those on the rank."""
    from megatron.core import parallel_state

    if not name.startswith("decoder.layers."):
        return name
    head, layer, rest = name.removeprefix("decoder.").split(".", 2)
    if ".local_experts." in rest:
        before, number, after = re.match(r"(.*\.local_experts\.)(\d+)(.*)", rest).groups()
        experts_per_rank = part.config.num_moe_experts // part.config.expert_model_parallel_size
        rest = f"{before}{int(number) + parallel_state.get_expert_model_parallel_rank() * experts_per_rank}{after}"
    return f"decoder.{head}.{int(layer) + part.layer_numbers[0] - 1}.{rest}"
