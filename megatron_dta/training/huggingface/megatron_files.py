"""Reads and writes the files of a Megatron distributed checkpoint (``torch_dist``) piece by piece, without a model.

    __GROUP_NUMBER.distcp   consecutive pieces of tensors, each serialized by PyTorch
    .metadata               the rectangle and the location of every piece (written last)
    common.pt               the state common to all ranks: here the settings
    metadata.json           the format's name

A checkpoint stores the tensors of the whole model (Megatron's ``ShardedTensor``), of which any rank of any mesh reads
its part. Pieces can therefore have any boundaries. They follow the parts of the mesh that will load the checkpoint, and
are small enough that memory use does not depend on the largest tensor. Megatron's modules also store an extra state,
which is empty here but must exist.
"""

from __future__ import annotations

import errno
import json
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.plain_values import Section, load_values
from megatron_dta.training.checkpoint.restricted_pickle import read_metadata
from megatron_dta.training.huggingface.parameters import Parameter, Sharding, StoredAt, StoredTensor

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Megatron's modules that store an extra state.
_WITH_EXTRA_STATE = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
_WITH_EXTRA_STATE += ("in_proj.weight", "out_proj.weight")
_COMMON_STATE = "common_state/shard_0_1"


class Piece(NamedTuple):
    """A rectangle of one parameter that is stored contiguously in a file; ``columns`` is None for a vector."""

    parameter: int
    rows: tuple[int, int]
    columns: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.rows[1] - self.rows[0]
        return (rows,) if self.columns is None else (rows, self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class StoredPiece:
    """The location of a piece of a parameter: its rows and columns, and its file and byte offset."""

    path: Path
    offset: int
    length: int
    row: int
    column: int
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The piece, on the host; ``InputError`` if the file is damaged."""
        try:
            with open(self.path, "rb") as file:
                section = Section(file, self.offset, self.length)
                values = load_values(section)
        except Exception as error:
            # Damaged bytes give PyTorch's reader wrong types, and any error.
            raise InputError(f"{self.path}: is damaged or truncated; write the checkpoint again") from error
        if not _is_plain_tensor(values) or values.numel() != math.prod(self.shape):
            raise InputError(f"{self.path}: holds no tensor of the shape {list(self.shape)} at byte {self.offset}")
        return values.reshape(self.shape)


def _is_plain_tensor(values: Any) -> bool:
    return type(values) is Tensor and values.layout is torch.strided and values.is_cpu and values.is_floating_point()


class MegatronCheckpoint:
    """The parameters of a distributed checkpoint, addressed as parameters of the whole model.

    Raises:
        InputError: the folder holds no distributed checkpoint, or a damaged one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_place: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        for name in ("metadata.json", "common.pt"):
            if (path / name).exists() and not (path / name).is_file():
                # Reading a pipe would block forever.
                raise InputError(f"{path / name}: is no file; write the checkpoint again")
        try:
            content = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("sharded_backend") != "torch_dist":
                raise InputError(f"{path}: is not a checkpoint in the format torch_dist")
            self._metadata = read_metadata_of(path)
        except (OSError, ValueError, RecursionError, pickle.UnpicklingError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: is not a readable distributed checkpoint ({error})") from error

    def settings(self) -> dict[str, Any] | None:
        """All settings of the run that wrote the checkpoint, by flag; None if another project wrote it."""
        try:
            common = self._common()
        except pickle.UnpicklingError as error:
            if "weights_only" in str(error):
                raise InputError(f"{self.path}: its common state holds objects that could run code") from error
            raise InputError(f"{self.path}: its common state cannot be read ({error})") from error
        except Exception as error:
            # Damaged bytes give PyTorch's reader wrong types, and any error.
            raise InputError(f"{self.path}: its common state is missing or cannot be read") from error
        return saved_settings(self.path, common)

    def end_id(self) -> int | None:
        """The token that ends the responses that the model was trained on; None if the checkpoint does not say."""
        if not self.settings():
            return None
        progress = self._common()["megatron_dta"].get("progress")
        end_id = progress.get("end_id") if isinstance(progress, dict) else None
        return end_id if type(end_id) is int and end_id >= 0 else None

    def _common(self) -> Any:
        """The state common to all ranks. Since Megatron-Core 0.19 it is stored among the pieces."""
        stored = self._metadata.storage_data.get(MetadataIndex(_COMMON_STATE))
        if stored is None:
            with open(self.path / "common.pt", "rb") as file:
                return load_values(file)
        with open(self.path / stored.relative_path, "rb") as file:
            return load_values(Section(file, stored.offset, stored.length))[0]

    def dtype_of(self, parameter: Parameter) -> torch.dtype:
        """The dtype in which a parameter is stored."""
        return self._found(parameter, parameter.stored_tensors[0])[1].properties.dtype

    def pieces_of(self, parameter: Parameter) -> Iterator[StoredPiece]:
        """Yield all pieces of a parameter. Together they cover it, including padding of the vocabulary."""
        covered = 0
        for tensor in parameter.stored_tensors:
            (key, place, _), _ = self._found(parameter, tensor)
            for chunk in self._chunks(key + tensor.suffix, len(place)).get(place, []):
                where = self._metadata.storage_data.get(MetadataIndex(key + tensor.suffix, chunk.offsets))
                if where is None:
                    raise InputError(f"{self.path}: its metadata does not say where {key}{tensor.suffix} is")
                shape, offsets = (
                    _without_filter_axis(each[len(place) :], parameter) for each in (chunk.sizes, chunk.offsets)
                )
                covered += torch.Size(shape).numel()
                column = offsets[1] if len(offsets) > 1 else 0
                path = self.path / where.relative_path
                yield StoredPiece(path, where.offset, where.length, tensor.row + offsets[0], column, shape)
        if covered < torch.Size(parameter.shape).numel():
            raise InputError(f"{self.path}: {parameter.name} is not whole in the checkpoint")

    def _chunks(self, key: str, axes: int) -> dict[tuple[int, ...], list[ChunkStorageMetadata]]:
        """Chunks of a checkpoint's tensor by their position along its first ``axes`` axes."""
        if key not in self._by_place:
            found = self._by_place[key] = {}
            for chunk in self._metadata.state_dict_metadata[key].chunks:
                if all(size == 1 for size in chunk.sizes[:axes]):
                    found.setdefault(tuple(chunk.offsets[:axes]), []).append(chunk)
        return self._by_place[key]

    def _found(self, parameter: Parameter, tensor: StoredTensor) -> tuple[StoredAt, TensorStorageMetadata]:
        """The location of a parameter and the metadata of one of its tensors, whose shape is checked."""
        known, suffix = self._metadata.state_dict_metadata, tensor.suffix
        described = ((place, known.get(place.key + suffix)) for place in parameter.places)
        place, stored = next((pair for pair in described if isinstance(pair[1], TensorStorageMetadata)), (None, None))
        if place is None:
            raise InputError(
                f"{self.path}: has no {parameter.stored_at.key}{suffix}; is it of the model in config.json?"
            )
        shape = _with_filter_axis((tensor.rows, *parameter.shape[1:]), parameter, 1)
        expected, found, axis = (*place.count, *shape), tuple(stored.size), len(place.count)
        fits = found == expected
        if parameter.sharding is Sharding.VOCABULARY and len(found) == len(expected):
            # Rows beyond the vocabulary are padding.
            fits = found[axis] >= expected[axis] and found[axis + 1 :] == expected[axis + 1 :]
        if not fits:
            raise InputError(
                f"{self.path}: {place.key}{suffix} has the shape {list(found)}; config.json says {list(expected)}"
            )
        return place, stored


def _with_filter_axis(sizes: tuple[int, ...], parameter: Parameter, value: int) -> tuple[int, ...]:
    """``sizes`` of rows and columns with ``value`` between them for a filter, which is stored with such an axis."""
    return (sizes[0], value, *sizes[1:]) if parameter.is_filter else sizes


def _without_filter_axis(sizes: Sequence[int], parameter: Parameter) -> tuple[int, ...]:
    return (sizes[0], *sizes[2:]) if parameter.is_filter else tuple(sizes)


def read_metadata_of(path: Path) -> Metadata:
    """The metadata of the checkpoint ``path``.

    Raises:
        OSError: there is no metadata file.
        pickle.UnpicklingError: it holds no metadata.
    """
    if not (path / ".metadata").is_file():
        raise FileNotFoundError(errno.ENOENT, "there is no .metadata")
    with open(path / ".metadata", "rb") as file:
        return read_metadata(file)


def saved_settings(path: Path, common: Any) -> dict[str, Any] | None:
    """The settings by flag in a checkpoint's common state; None if another project wrote the checkpoint.

    Raises:
        InputError: the settings do not have this project's format.
    """
    own = common.get("megatron_dta") if isinstance(common, dict) else None
    if own is None:
        return None
    try:
        settings = json.loads(own["settings"])
    except (KeyError, TypeError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InputError(f"{path}: its settings cannot be read; was it changed after it was written?")
    return settings


class PieceWriter:
    """Appends pieces to one file of a checkpoint and records their locations."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.spans: list[tuple[int, int]] = []

    def append(self, values: Any) -> None:
        """Append a tensor or an extra state."""
        start = self._file.tell()
        torch.save(values, self._file)
        self.spans.append((start, self._file.tell() - start))


def extra_states_of(parameter: Parameter) -> list[str]:
    """Names under which Megatron stores the extra state of the parameter's module."""
    key, index, count = parameter.stored_at
    if not key.endswith(_WITH_EXTRA_STATE):
        return []
    shard = ".".join(map(str, index or (0,))) + "_" + ".".join(map(str, count or (1,)))
    return [f"{key.removesuffix('weight')}_extra_state/shard_{shard}"]


def write_metadata(
    folder: Path,
    parameters: list[Parameter],
    rows: list[int],
    dtypes: list[torch.dtype],
    files: dict[str, list[tuple[Piece | str, tuple[int, int]]]],
    common: dict[str, Any],
) -> None:
    """Write the metadata, which completes a checkpoint.

    Args:
        rows, dtypes: number of rows (including padding) and dtype of every written parameter.
        files: pieces (or names of extra states) of every file, each with its start and length in bytes.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {
        parameter.stored_at.key + tensor.suffix: [] for parameter in parameters for tensor in parameter.stored_tensors
    }
    results: list[WriteResult] = []
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, pieces in files.items():
        for piece, (start, length) in pieces:
            if isinstance(piece, str):
                index = MetadataIndex(piece)
                described[piece] = BytesStorageMetadata()
            else:
                parameter = parameters[piece.parameter]
                place = parameter.stored_at
                # A piece begins and ends in one tensor, like the parts that ranks hold.
                tensor = next(each for each in reversed(parameter.stored_tensors) if each.row <= piece.rows[0])
                column = () if piece.columns is None else (piece.columns[0],)
                first = _with_filter_axis((piece.rows[0] - tensor.row, *column), parameter, 0)
                offsets = torch.Size((*place.index, *first))
                sizes = torch.Size((*(1 for _ in place.index), *_with_filter_axis(piece.shape, parameter, 1)))
                chunks[place.key + tensor.suffix].append(ChunkStorageMetadata(offsets, sizes))
                index = MetadataIndex(place.key + tensor.suffix, offsets)
            results.append(WriteResult(index, length, _StorageInfo(name, start, length)))
    for parameter, count, dtype in zip(parameters, rows, dtypes, strict=True):
        key, _, places = parameter.stored_at
        for tensor in parameter.stored_tensors:
            rows_of_tensor = tensor.rows if tensor.suffix else count
            shape = _with_filter_axis((rows_of_tensor, *parameter.shape[1:]), parameter, 1)
            name, size = key + tensor.suffix, torch.Size((*places, *shape))
            described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks[name])
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
    FileSystemWriter(folder).finish(Metadata(described), [results])
