"""Reads LoRA adapters from checkpoints, and either merges them into the weights or writes them for PEFT.

A checkpoint of a LoRA run holds only the adapters; their base weights are in the folder ``base`` beside it. An
adapter's B has the same rows as the weight that it is added to, so it is split into Hugging Face tensors like the
weight. All of these tensors share A.

    adapter_config.json, adapter_model.safetensors     what ``peft.PeftModel.from_pretrained`` loads

The layout is that of https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.huggingface.megatron_files import MegatronCheckpoint, StoredPiece
from megatron_dta.training.huggingface.parameters import Block, Parameter, Sharding
from megatron_dta.training.huggingface.safetensors_output import SafetensorsOutput, Shapes, lay_out

BASE = "base"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, settings: dict[str, Any] | None) -> LoraSettings | None:
        """Read the LoRA settings from a checkpoint's settings by flag; None if it has no adapters."""
        if settings is None or settings.get("--lora-rank") is None:
            return None
        rank, alpha, targets = (settings.get(f"--lora-{name}") for name in ("rank", "alpha", "target-modules"))
        if type(rank) is not int or not isinstance(alpha, int | float) or not isinstance(targets, list) or rank < 1:
            raise InputError("a checkpoint's settings name LoRA adapters but not their rank, alpha and modules")
        return cls(rank, alpha, tuple(map(str, targets)))

    def adapts(self, parameter: Parameter) -> bool:
        """Whether a parameter has an adapter."""
        return parameter.name.endswith(tuple(f".{target}.weight" for target in self.targets))


def base_of(checkpoint: Path) -> Path:
    """The folder of the base weights of a checkpoint's adapters.

    Raises:
        InputError: the folder does not exist.
    """
    base = checkpoint.parent / BASE
    if not (base / "metadata.json").is_file():
        raise InputError(f"{checkpoint}: holds adapters alone, and the weights they belong to are not in {base}")
    return base


class CheckpointAdapters:
    """The adapters of a checkpoint.

    Raises:
        InputError: it has none, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.checkpoint = MegatronCheckpoint(path)
        found = LoraSettings.of(self.checkpoint.settings())
        if found is None:
            raise InputError(f"{path}: has no LoRA adapters")
        self.settings = found
        # The pieces of one weight are requested consecutively.
        self.matrices = lru_cache(maxsize=2)(self._matrices)

    def _matrices(self, parameter: Parameter) -> tuple[Tensor, Tensor]:
        """A and B, whole."""
        first, second = _parameters(parameter, self.settings.rank)
        return self._read(first), self._read(second)

    def _read(self, parameter: Parameter) -> Tensor:
        whole = torch.empty(parameter.shape, dtype=self.checkpoint.dtype_of(parameter))
        for piece in self.checkpoint.pieces_of(parameter):
            rows, columns = piece.shape
            whole[piece.row : piece.row + rows, piece.column : piece.column + columns] = piece.read()
        return whole

    def merged(self, parameter: Parameter, piece: StoredPiece, values: Tensor) -> Tensor:
        """Add the adapter's part to a piece of a weight, in at least float32."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        first, second = self.matrices(parameter)
        rows, columns = piece.shape
        second = second[piece.row : piece.row + rows].to(dtype)
        first = first[:, piece.column : piece.column + columns].to(dtype)
        scale = self.settings.alpha / self.settings.rank
        return torch.addmm(values.to(dtype), second, first, alpha=scale)

    def peft_tensors(self, parameters: list[Parameter]) -> dict[str, Tensor]:
        """All adapter matrices by PEFT's names."""
        found: dict[str, Tensor] = {}
        for parameter in filter(self.settings.adapts, parameters):
            first, second = self.matrices(parameter)
            for tensor, rows in parameter.split(second).items():
                name = _PREFIX + tensor.removesuffix(".weight")
                found[f"{name}.lora_A.weight"] = first
                found[f"{name}.lora_B.weight"] = rows.contiguous()
        return found


def _parameters(parameter: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    """The adapter's A and B for ``parameter``, as parameters of the whole model."""

    def of(name: str, shape: tuple[int, int], sharding: Sharding, blocks: tuple[Block, ...]) -> Parameter:
        def renamed(key: str) -> str:
            return f"{key.removesuffix('.weight')}_adapter.{name}"

        places = tuple(place._replace(key=renamed(place.key)) for place in parameter.places)
        changes = {"name": renamed(parameter.name), "shape": shape, "sharding": sharding}
        # Sections are parts of the outputs.
        sections = parameter.sections if blocks else ()
        return replace(parameter, **changes, blocks=blocks, places=places, sections=sections)

    rows, columns = parameter.shape
    divides_columns = parameter.sharding is Sharding.COLUMNS
    first = of("lora_A", (rank, columns), Sharding.COLUMNS if divides_columns else Sharding.WHOLE, ())
    second = of("lora_B", (rows, rank), Sharding.WHOLE if divides_columns else parameter.sharding, parameter.blocks)
    return first, second


@dataclass
class ToPeft:
    """Writes a checkpoint's adapters for PEFT; ``conversion.job`` runs it.

    Attributes:
        source: the checkpoint itself.
        template: Hugging Face checkpoint of the base, which the configuration names.
        parameters: all parameters of the whole model.
        dtype: dtype of the written matrices; None keeps theirs.
    """

    source: Path
    template: Path
    parameters: list[Parameter]
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        tensors = CheckpointAdapters(self.source).peft_tensors(self.parameters)
        shapes: Shapes = {
            name: (tuple(values.shape), self.dtype or values.dtype) for name, values in sorted(tensors.items())
        }
        (layout,) = lay_out(shapes, 1 << 62)
        self._layout = replace(layout, name=WEIGHTS)

    def files(self) -> dict[str, int]:
        """The name and the size of the only file."""
        return {WEIGHTS: self._layout.size}

    def fingerprint(self) -> dict[str, Any]:
        """The values that the file depends on."""
        stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(self.source.iterdir())]
        return {"to": "peft", "source": str(self.source), "dtype": str(self.dtype), "files_read": stamps}

    def write_file(self, name: str, folder: Path, advance: Any) -> None:
        tensors = CheckpointAdapters(self.source).peft_tensors(self.parameters)
        with SafetensorsOutput(folder, self._layout, advance) as output:
            for tensor, values in sorted(tensors.items()):
                output.write(tensor, 0, values)
            output.finish()

    def finish(self, folder: Path, records: dict[str, Any]) -> None:
        """Add the configuration."""
        settings = CheckpointAdapters(self.source).settings
        modules = {name.split(".")[-3] for name in self._layout.shapes}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.template),
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
