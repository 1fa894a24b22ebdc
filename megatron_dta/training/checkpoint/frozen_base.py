"""Splits the checkpoints of a LoRA run: the frozen weights are saved once, the adapters in every checkpoint.

    SAVE/base/                                 the frozen weights, written when the run begins
    SAVE/iter_0000200/                         adapters, optimizer, and the rest of the training state

Both are Megatron distributed checkpoints and load on any mesh. A checkpoint's base is the folder ``base`` beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.parallel.staged_model import Model, StagedModel

# Key in the checkpoint's ``megatron_dta`` entry: the checkpoint's model holds only adapters.
ADAPTERS_ONLY = "adapters_only"
BASE = "base"
_ADAPTER = "_adapter.lora_"


def base_of(checkpoint: Path) -> Path:
    """The folder of the base weights of a checkpoint's adapters.

    Raises:
        InputError: the folder does not exist.
    """
    base = checkpoint.parent / BASE
    if not (base / "metadata.json").is_file():
        raise InputError(f"{checkpoint}: holds adapters alone, and the weights they belong to are not in {base}")
    return base


def trained_part(state: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The part of a model's (sharded) state that a checkpoint holds: the adapters if there are any, otherwise all."""
    return state if model.lora_rank is None else adapter_part(state)


def adapter_part(state: dict[str, Any]) -> dict[str, Any]:
    """The adapters in a model's (sharded) state. The state is nested if a pipeline rank has several model chunks."""
    return _select(state, lambda name: _ADAPTER in name)


def base_part(state: dict[str, Any]) -> dict[str, Any]:
    """The (sharded) state without the adapters."""
    return _select(state, lambda name: _ADAPTER not in name)


def _select(state: dict[str, Any], chosen: Any) -> dict[str, Any]:
    nested = {name: _select(values, chosen) for name, values in state.items() if isinstance(values, dict)}
    return {name: nested.get(name, values) for name, values in state.items() if name in nested or chosen(name)}


def load_part(model: Model, state: dict[str, Any]) -> None:
    """Load a state that holds only the adapters or only the base.

    Raises:
        ValueError: the state has a parameter that the model lacks.
    """
    for number, chunk in enumerate(model.model_chunks):
        weights = state[str(number)] if isinstance(model, StagedModel) else state
        unexpected = chunk.load_state_dict(weights, strict=False).unexpected_keys
        if unexpected:
            raise ValueError(f"the model has no {unexpected[0]}")
