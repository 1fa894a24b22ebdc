"""Converts checkpoints between Hugging Face's form and Megatron's distributed one, without holding the model.

The model is built on the meta device, which stores no values. Its sharded state says where a distributed checkpoint
holds each parameter, and ``HfWeights``, which also serves training, what the parameter consists of in Hugging Face's
form. Values are read when they are written, so memory is bounded by a parameter or a file of the output.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import new_folder
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.config.options import flag_of
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.training.checkpoint.files import TRACKER
from megatron_dta.training.checkpoint.frozen_base import base_of
from megatron_dta.training.checkpoint.integrity import check_checkpoint, check_parts, checksums_of, write_checksums
from megatron_dta.training.checkpoint.reader import READ_ERRORS, read_common, saved_settings, unreadable
from megatron_dta.training.checkpoint.restricted_pickle import read_metadata
from megatron_dta.training.config.train import stored
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config, settings_from_hf
from megatron_dta.training.huggingface.config.end_token import name_end_token
from megatron_dta.training.huggingface.files import SafetensorsFolder, prefix_in, write_file
from megatron_dta.training.huggingface.folder import write_folder
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.parameters import Part
from megatron_dta.training.huggingface.weights import HeldPart, HfWeights, check_tensors, read_part

PIECE_BYTES = 1 << 26
# Megatron's name for a checkpoint that was not made by a training step.
RELEASE = "release"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Settings of a run that do not change the meaning of any weight.
_FREE_SETTINGS = ("max_position_embeddings", "init_method_std", "make_vocab_size_divisible_by")
_FREE_SETTINGS += ("moe_router_bias_update_rate",)


class MetaModel:
    """A model without values, and where distributed checkpoints hold its parameters.

    Attributes:
        weights: its weights under Hugging Face's names.
        shards: the parts of every parameter, by its name; each part is some of its rows.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        self.config = config
        initialize_parallel(0)
        with torch.device("meta"):
            self.model = build_model(config, torch.device("meta"))
        state = self.model.sharded_state_dict()
        apply_factories(state)
        self.shards: dict[str, list[ShardedTensor]] = {}
        self.extra_states: list[ShardedObject] = []
        for name, entry in state.items():
            parts = list(nested_values({name: entry}))
            self.shards[name] = [part for part in parts if isinstance(part, ShardedTensor)]
            self.extra_states += [part for part in parts if isinstance(part, ShardedObject)]
        family, shape = architecture(read_hf_config(folder)).architecture, ModelShape.of(config)
        self.weights = HfWeights([self.model], family, shape, prefix=prefix_in(folder))


def _rectangle(shard: ShardedTensor, first: int = 0, last: int | None = None) -> ChunkStorageMetadata:
    """Rows of a shard, as a rectangle of the checkpoint's tensor, whose first axes may count layers and experts."""
    axes, rows = shard.prepend_axis_num, (shard.data.shape[0] if last is None else last) - first
    offsets = (*shard.global_offset[:axes], shard.global_offset[axes] + first, *shard.global_offset[axes + 1 :])
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size((*[1] * axes, rows, *shard.data.shape[1:])))


def _first_row(shard: ShardedTensor) -> int:
    """The row of the parameter at which a shard begins."""
    return shard.data.storage_offset() // shard.data.stride(0)


class CheckpointReader:
    """Reads parameters of a distributed checkpoint one at a time.

    Raises:
        InputError: a file is missing, truncated or damaged.
    """

    def __init__(self, path: Path, model: MetaModel) -> None:
        check_parts(path)
        megatron_patches.read_checkpoints_without_running_them(read_metadata)
        self._path, self._shards = path, model.shards
        self._parameters = dict(model.model.named_parameters()) | dict(model.model.named_buffers())
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self._targets: dict[MetadataIndex, Tensor] = {}

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a parameter is stored."""
        return self._stored(self._shards[name][0]).properties.dtype

    def read(self, name: str) -> Tensor:
        """A whole parameter."""
        whole = torch.empty(self._parameters[name].shape, dtype=self.dtype_of(name))
        items, covered = [], 0
        self._targets = {}
        for shard in self._shards[name]:
            rectangle, first = _rectangle(shard), _first_row(shard)
            index = MetadataIndex(shard.key, rectangle.offsets)
            self._targets[index] = whole[first : first + shard.data.shape[0]].reshape(rectangle.sizes)
            reads = create_read_items_for_chunk_list(shard.key, self._stored(shard), [rectangle])
            covered += sum(item.lengths.numel() for item in reads)
            items += reads
        if covered != whole.numel():
            raise InputError(f"{self._path}: {name} is not whole in the checkpoint")
        try:
            self._reader.read_data(LoadPlan(items), self).wait()
        except READ_ERRORS as error:
            raise unreadable(self._path, error) from error
        return whole

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        """Where to read an item; called by PyTorch's reader."""
        target = self._targets[MetadataIndex(item.dest_index.fqn, item.dest_index.offset)]
        for axis, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Called by PyTorch's reader when an item has been read."""

    def _stored(self, shard: ShardedTensor) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata.get(shard.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise InputError(f"{self._path}: has no {shard.key}; is it of the model in config.json?")
        # An embedding may be padded.
        if tuple(stored.size) != tuple(shard.global_shape) and not shard.allow_shape_mismatch:
            raise InputError(
                f"{self._path}: {shard.key} has the shape {list(stored.size)}; config.json says "
                f"{list(shard.global_shape)}"
            )
        return stored


class _Piece(NamedTuple):
    held: HeldPart
    shard: ShardedTensor
    rows: tuple[int, int]

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.shard.key, _rectangle(self.shard, *self.rows).offsets)


class _HfPieces:
    """Reads the pieces of a distributed checkpoint from a Hugging Face folder when PyTorch's writer asks for them."""

    def __init__(self, source: SafetensorsFolder, model: MetaModel) -> None:
        self._source, self._pieces = source, {}
        self._dtypes: dict[str, torch.dtype] = {}
        for held in model.weights.held:
            # A checkpoint may hold the parameters of all layers in one tensor, which has one dtype.
            for shard in model.shards[held.parameter.name]:
                for tensor in held.parameter.tensors:
                    dtype = source.dtype_of(tensor)
                    self._dtypes[shard.key] = torch.promote_types(self._dtypes.get(shard.key, dtype), dtype)
        for held in model.weights.held:
            for shard in model.shards[held.parameter.name]:
                count = shard.data.shape[0]
                step = max(1, PIECE_BYTES // (shard.data[0].numel() * self._dtypes[shard.key].itemsize))
                pieces = [_Piece(held, shard, (first, min(first + step, count))) for first in range(0, count, step)]
                self._pieces |= {piece.index: piece for piece in pieces}
        self.plans = [*self._plans(), SavePlan([_extra_state(entry.unique_key) for entry in model.extra_states])]

    def _plans(self) -> Iterator[SavePlan]:
        """A file for every layer, one for what is before the layers and one for what is after them."""
        files: dict[tuple[int | None, bool], list[WriteItem]] = {}
        for index, piece in self._pieces.items():
            group = piece.held.parameter.layer, piece.held.parameter.name.startswith("embedding.")
            files.setdefault(group, []).append(self._write_item(index, piece))
        yield from map(SavePlan, files.values())

    def _write_item(self, index: MetadataIndex, piece: _Piece) -> WriteItem:
        data = TensorWriteData(
            _rectangle(piece.shard, *piece.rows),
            TensorProperties(dtype=self._dtypes[piece.shard.key]),
            torch.Size(piece.shard.global_shape),
        )
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        """The content of an item; called by PyTorch's writer."""
        if item.type is WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)
            return empty
        piece = self._pieces[MetadataIndex(item.index.fqn, item.index.offset)]
        first = _first_row(piece.shard)
        part = Part(((first + piece.rows[0], first + piece.rows[1]),), piece.held.part.columns)
        values = torch.empty(part.shape, dtype=self._dtypes[piece.shard.key])
        read_part(self._source, piece.held.parameter, part, values)
        return values.reshape(item.tensor_data.chunk.sizes)


def _extra_state(key: str) -> WriteItem:
    """What Megatron's modules store beside their parameters: here it is empty, but must exist."""
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


def to_megatron(reader: SafetensorsFolder, config: ModelConfig, common: dict[str, Any], target: Path) -> None:
    """Write the checkpoint folder ``target`` from a Hugging Face folder.

    Args:
        common: plain values for the checkpoint's common state.

    Raises:
        InputError: the folder is damaged or of another model, or the target cannot be written.
    """
    model = MetaModel(config, reader.folder)
    check_tensors(reader, model.weights.parameters, ModelShape.of(config))
    pieces = _HfPieces(reader, model)
    with new_folder(target) as folder:
        release = folder / RELEASE
        release.mkdir()
        writer = FileSystemWriter(release)
        plans, metadata = create_default_global_save_plan(writer.prepare_global_plan(pieces.plans))
        try:
            writer.finish(metadata, [writer.write_data(plan, pieces).wait() for plan in plans])
        except RuntimeError as error:  # PyTorch's archive writer raises it if the system refuses a write
            raise OSError("a file could not be written whole; is the disk full?") from error
        torch.save(common, release / "common.pt")
        (release / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")
        write_checksums(release, checksums_of(release, [path.name for path in release.iterdir()]))
        (folder / TRACKER).write_text(RELEASE, encoding="utf-8")


def to_huggingface(
    source: Path, template: Path, target: Path, dtype: torch.dtype | None = None, check: bool = True
) -> None:
    """Write the Hugging Face folder ``target`` from the distributed checkpoint ``source``.

    Args:
        template: Hugging Face folder of the same model, see ``folder``.
        dtype: dtype of the written weights; None keeps that of each.
        check: verify the files of the adapters' base first.

    Raises:
        InputError: the checkpoint cannot be read or is of another model, or the target cannot be written.
    """
    model, end_id = _model_of(source, template), None
    progress = read_common(source).get("megatron_dta", {}).get("progress")
    if isinstance(progress, dict):
        end_id = progress.get("end_id")
    reader = CheckpointReader(source, model)
    if _read_adapters(model, reader):
        if check:
            check_checkpoint(base_of(source))
        reader = CheckpointReader(base_of(source), model)

    def with_values(held: HeldPart) -> HeldPart:
        name, shape = held.parameter.name, held.values.shape
        values = torch.empty(shape, dtype=dtype or reader.dtype_of(name), device="meta")
        return held._replace(values=values, read=lambda: reader.read(name).reshape(shape))

    model.weights.held = [with_values(held) for held in model.weights.held]
    name_end = partial(name_end_token, end_id=end_id) if type(end_id) is int and end_id >= 0 else lambda folder: None
    write_folder(template, model.weights, target, "--save-hf", name_end)


def to_peft(source: Path, template: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the LoRA adapters of the distributed checkpoint ``source`` as ``PeftModel.from_pretrained`` loads them.

    The layout is that of https://huggingface.co/docs/peft/developer_guides/checkpoint.

    Raises:
        InputError: the checkpoint has no adapters or cannot be read, or the target cannot be written.
    """
    model = _model_of(source, template)
    if not _read_adapters(model, CheckpointReader(source, model)):
        raise InputError(f"{source}: has no LoRA adapters")
    tensors, modules = {}, set()
    for held in model.weights.held:
        # The tensors of a fused parameter share A; B has the rows of the parameter.
        for tensor, rows in held.parameter.split(held.adapter.lora_B.detach()).items() if held.adapter else ():
            name = f"base_model.model.{tensor.removesuffix('.weight')}"
            tensors[f"{name}.lora_A.weight"] = held.adapter.lora_A.detach().to(dtype, copy=True)
            tensors[f"{name}.lora_B.weight"] = rows.to(dtype, copy=True).contiguous()
            modules.add(tensor.split(".")[-2])
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(template),
        "r": model.config.lora_rank,
        "lora_alpha": model.config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(target) as folder:
        write_file(folder / ADAPTER_WEIGHTS, tensors)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_adapters(model: MetaModel, reader: CheckpointReader) -> bool:
    """Read the adapters, which are small, into the model; returns whether it has any."""
    adapters = {held.parameter.name: held.adapter for held in model.weights.held if held.adapter is not None}
    for name, adapter in adapters.items():
        for matrix in ("lora_A", "lora_B"):
            values = reader.read(f"{name.removesuffix('.weight')}_adapter.{matrix}")
            setattr(adapter, matrix, torch.nn.Parameter(values, requires_grad=False))
    return bool(adapters)


def model_of_checkpoint(path: Path, template: Path) -> ModelConfig:
    """The model of ``template``'s config.json with the checkpoint's adapters, checked against its settings.

    Shapes alone do not identify a model: 8 heads of size 64 have weights of the same shapes as 4 heads of size 128.

    Raises:
        InputError: the checkpoint is of another model.
    """
    saved = saved_settings(path, read_common(path)) or {}
    length = saved.get("--max-position-embeddings")
    settings = settings_from_hf(template, {} if length is None else {"max_position_embeddings": length})
    adapters = {setting.name: flag_of(setting) for setting in fields(ModelConfig) if setting.name.startswith("lora_")}
    lora = {name: saved[flag] for name, flag in adapters.items() if flag in saved}
    try:
        model = ModelConfig(**settings, **lora)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: its settings name LoRA adapters that cannot be ({error})") from error
    for setting in fields(ModelConfig):
        flag, here = flag_of(setting), stored(getattr(model, setting.name))
        saved_value = saved.get(flag, here)
        if setting.name in settings and setting.name not in _FREE_SETTINGS and saved_value != here:
            raise InputError(f"{path}: is of another model: {flag} is {saved_value} there and {here} by {template}")
    return model


def _model_of(source: Path, template: Path) -> MetaModel:
    return MetaModel(model_of_checkpoint(source, template), template)
