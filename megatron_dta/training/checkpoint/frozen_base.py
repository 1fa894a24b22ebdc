"""Checkpoints of a run with LoRA adapters: the frozen weights once, the adapters in every checkpoint.

    SAVE/base/                                 the frozen weights, written when the run begins
    SAVE/iter_0000200/                         adapters, optimizer, and all else that a run goes on from

Both are Megatron's distributed checkpoints and load on any mesh. A checkpoint's base is the folder ``base`` beside it.
"""

from __future__ import annotations

from typing import Any

from megatron_dta.config import ModelConfig
from megatron_dta.model import Model, StagedModel

# Of a checkpoint's own entry: its model is adapters alone.
ADAPTERS_ONLY = "adapters_only"
_ADAPTER = "_adapter.lora_"


def trained_part(state: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """What a checkpoint holds of a model's (sharded) state: adapters where there are some, else all."""
    return state if model.lora_rank is None else adapter_part(state)


def adapter_part(state: dict[str, Any]) -> dict[str, Any]:
    """The adapters of a model's (sharded) state, which for a pipeline rank's parts is nested."""
    return _select(state, lambda name: _ADAPTER in name)


def base_part(state: dict[str, Any]) -> dict[str, Any]:
    """All but the adapters."""
    return _select(state, lambda name: _ADAPTER not in name)


def _select(state: dict[str, Any], chosen: Any) -> dict[str, Any]:
    nested = {name: _select(values, chosen) for name, values in state.items() if isinstance(values, dict)}
    return {name: nested.get(name, values) for name, values in state.items() if name in nested or chosen(name)}


def load_part(model: Model, state: dict[str, Any]) -> None:
    """Load the adapters or the base alone."""
    for number, part in enumerate(model.parts):
        own = state[str(number)] if isinstance(model, StagedModel) else state
        unexpected = part.load_state_dict(own, strict=False).unexpected_keys
        if unexpected:
            raise ValueError(f"the model has no {unexpected[0]}")
