"""Converts a Megatron distributed checkpoint to a Hugging Face checkpoint, one piece at a time.

Every file of the target is written independently from the pieces that it needs. The configuration, the tokenizer and
all other files are copied unchanged from a template, a Hugging Face checkpoint of the same model. If
the template has the same tensors, it also determines their division into files. Tensors that it has beside the text
model, such as a vision tower, are copied too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.config.options import flag_of
from megatron_dta.training.huggingface.config.config import settings_from_hf
from megatron_dta.training.huggingface.config.end_token import name_end_token
from megatron_dta.training.huggingface.files import INDEX, carried_tensors, prefix_in, weight_map_of
from megatron_dta.training.huggingface.job import source_stamp
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of
from megatron_dta.training.huggingface.megatron_files import MegatronCheckpoint
from megatron_dta.training.huggingface.parameters import Parameter, Part
from megatron_dta.training.huggingface.peft import CheckpointAdapters
from megatron_dta.training.huggingface.safetensors_output import (
    FileLayout,
    SafetensorsOutput,
    Shapes,
    index_of,
    lay_out,
)

# Settings of a run that do not change the meaning of any weight.
FREE_SETTINGS = ("max_position_embeddings", "init_method_std")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json", ".py")


@dataclass
class ToHuggingFace:
    """The conversion of one checkpoint; ``conversion.job`` runs it.

    Attributes:
        source: the checkpoint itself, not the folder of a run.
        template: Hugging Face checkpoint that the configuration and the tokenizer come from.
        dtype: dtype of the written weights; None keeps the dtype of each.
        max_shard_bytes: maximum size of a file; None uses the template's division into files.
        adapters: checkpoint whose LoRA adapters are merged into the weights.
        end_id: the token that ends a response, which the files are to name; None leaves them as they are.
    """

    source: Path
    template: Path
    architecture: str
    shape: ModelShape
    dtype: torch.dtype | None = None
    max_shard_bytes: int | None = None
    adapters: Path | None = None
    end_id: int | None = None

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            for piece in self.checkpoint.pieces_of(parameter):
                if not piece.path.is_file() or piece.path.stat().st_size < piece.offset + piece.length:
                    raise InputError(f"{piece.path}: is missing or truncated; write the checkpoint again")

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @cached_property
    def checkpoint(self) -> MegatronCheckpoint:
        return MegatronCheckpoint(self.source)

    @cached_property
    def _adapters(self) -> CheckpointAdapters | None:
        return None if self.adapters is None else CheckpointAdapters(self.adapters)

    @cached_property
    def parameters(self) -> list[Parameter]:
        return parameters_of(self.architecture, self.shape, prefix_in(self.template))

    @cached_property
    def layouts(self) -> list[FileLayout]:
        tensors: Shapes = {}
        for parameter in self.parameters:
            dtype = self.dtype or self.checkpoint.dtype_of(parameter)
            tensors |= {name: (shape, dtype) for name, shape in parameter.tensors.items()}
        return lay_out_like(self.template, tensors, self.max_shard_bytes)

    @cached_property
    def _layout_of(self) -> dict[str, FileLayout]:
        return {layout.name: layout for layout in self.layouts}

    @cached_property
    def _parameters_in(self) -> dict[str, list[Parameter]]:
        """The parameters that each file needs."""
        file_of = {tensor: layout.name for layout in self.layouts for tensor in layout.shapes}
        found: dict[str, list[Parameter]] = {layout.name: [] for layout in self.layouts}
        for parameter in self.parameters:
            for name in dict.fromkeys(file_of[tensor] for tensor in parameter.tensors):
                found[name].append(parameter)
        return found

    def files(self) -> dict[str, int]:
        """Names and sizes of the weight files."""
        return {layout.name: layout.size for layout in self.layouts}

    def fingerprint(self) -> dict[str, Any]:
        """The values that the files depend on."""
        settings = {item.name: str(getattr(self, item.name)) for item in fields(self)}
        paths = [self.source / ".metadata", *sorted(self.source.glob("*.distcp")), *carried_files(self.template)]
        if self.adapters is not None:
            paths += [self.adapters / ".metadata", *sorted(self.adapters.glob("*.distcp"))]
        return {"to": "huggingface", **settings, "files_read": source_stamp(paths)}

    def write_file(self, name: str, folder: Path, advance: Callable[[int], None]) -> None:
        with SafetensorsOutput(folder, self._layout_of[name], advance) as output:
            for parameter in self._parameters_in[name]:
                self._write_parameter(parameter, output)
            output.finish()

    def _write_parameter(self, parameter: Parameter, output: SafetensorsOutput) -> None:
        """Write the tensors of a parameter that belong to the file."""
        parts: dict[str, Tensor] = {}
        for piece in self.checkpoint.pieces_of(parameter):
            end = piece.row + piece.shape[0]
            columns = (piece.column, piece.column + piece.shape[1]) if len(piece.shape) > 1 else None
            copies = [
                copy
                for copy in parameter.copies(Part(((piece.row, end),), columns))
                if copy.tensor in output.layout.shapes
            ]
            values = piece.read() if copies else None
            if copies and self._adapters is not None and self._adapters.settings.adapts(parameter):
                values = self._adapters.merged(parameter, piece, values)
            for copy in copies:
                rows = values[copy.row : copy.row + copy.rows]
                rows = rows.unsqueeze(1) if parameter.is_filter else rows
                if columns is None or columns == (0, parameter.shape[1]):
                    output.write(copy.tensor, copy.tensor_row, rows)
                    continue
                # These are the columns of one rank; the rows are complete when the columns of all ranks are there.
                if copy.tensor not in parts:
                    parts[copy.tensor] = torch.empty(parameter.tensors[copy.tensor], dtype=values.dtype)
                parts[copy.tensor][copy.tensor_row : copy.tensor_row + copy.rows, slice(*columns)] = rows
        for tensor, whole in parts.items():
            output.write(tensor, 0, whole)

    def finish(self, folder: Path, records: dict[str, Any]) -> None:
        """Add the index and the files that are copied from the template."""
        write_surroundings(self.template, folder, self.layouts)
        if self.end_id is not None:
            name_end_token(folder, self.end_id)


def model_of_checkpoint(path: Path, template: Path) -> ModelConfig:
    """The model of ``template``'s config.json, checked against the settings in the checkpoint ``path``.

    Shapes alone do not identify a model: 8 heads of size 64 have weights of the same shapes as 4 heads of size 128.

    Raises:
        InputError: the checkpoint is of another model.
    """
    saved = MegatronCheckpoint(path).settings() or {}
    length = saved.get("--max-position-embeddings")
    if length is not None and type(length) is not int:
        raise InputError(f"{path}: its setting --max-position-embeddings is {str(length)[:40]!r}, not a number")
    settings = settings_from_hf(template, {} if length is None else {"max_position_embeddings": length})
    model = ModelConfig(**settings)
    for setting in fields(ModelConfig):
        flag, here = flag_of(setting), getattr(model, setting.name)
        there = saved.get(flag, here)
        if setting.name in settings and setting.name not in FREE_SETTINGS and there != here:
            raise InputError(f"{path}: is of another model: {flag} is {there} there and {here} by {template}")
    return model


def lay_out_like(template: Path, tensors: Shapes, max_shard_bytes: int | None) -> list[FileLayout]:
    """Lay out files like ``template``'s if it has these tensors and no size is given, otherwise by size.

    The tensors that ``template`` has beside the text model are copied.
    """
    return lay_out(tensors, max_shard_bytes, weight_map_of(template), carried_tensors(template))


def carried_files(template: Path) -> list[Path]:
    """The files of a checkpoint other than the weights, such as configuration, tokenizer and license."""
    return sorted(
        path
        for path in template.iterdir()
        if path.is_file() and not path.name.endswith(_WEIGHTS) and not path.name.startswith(".")
    )


def write_surroundings(template: Path, folder: Path, layouts: list[FileLayout]) -> None:
    """Write the index of the weight files and copy the other files of the template."""
    for path in carried_files(template):
        shutil.copyfile(path, folder / path.name)
    _correct_dtype(folder / "config.json", layouts)
    index = index_of(layouts)
    if index is None:
        return
    own = template / INDEX
    if own.is_file() and _same_index(own.read_text(encoding="utf-8"), index):
        shutil.copyfile(own, folder / INDEX)
    else:
        (folder / INDEX).write_text(index, encoding="utf-8")


def _same_index(left: str, right: str) -> bool:
    try:
        first, second = json.loads(left), json.loads(right)
        sizes = [content.get("metadata", {}).get("total_size") for content in (first, second)]
        return first["weight_map"] == second["weight_map"] and sizes[0] == sizes[1]
    except (ValueError, KeyError, AttributeError, RecursionError):
        # The list of files was readable, and the other entries of the index are not needed.
        return False


def _correct_dtype(path: Path, layouts: list[FileLayout]) -> None:
    """Write the dtype of the weights into config.json, unless it is correct already."""
    counts: dict[torch.dtype, int] = {}
    for layout in layouts:
        for shape, dtype in layout.shapes.values():
            counts[dtype] = counts.get(dtype, 0) + torch.Size(shape).numel()
    name = str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")
    config = json.loads(path.read_text(encoding="utf-8"))
    holders = [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]
    wrong = [(each, key) for each in holders for key in ("dtype", "torch_dtype") if each.get(key, name) != name]
    for holder, key in wrong:
        holder[key] = name
    if wrong:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
