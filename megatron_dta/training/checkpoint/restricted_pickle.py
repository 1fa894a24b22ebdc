"""Reads the metadata of distributed checkpoints without executing code that a file names.

PyTorch stores the metadata as a pickle (``.metadata``) of a protocol that its weights-only unpickler does not know, and
reads it with access to everything that Python can import. This unpickler knows the classes of such metadata only.
"""

from __future__ import annotations

import errno
import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata

_CLASSES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (metadata, ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (metadata, ("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (filesystem, ("_StorageInfo", "_StoragePrefix")),
    (planner, ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    (torch.serialization, ("_get_layout",)),
)
_NAMES: dict[tuple[str, str], Any] = {
    **{(module.__name__, name): getattr(module, name) for module, names in _CLASSES for name in names},
    **{
        ("torch", str(value).removeprefix("torch.")): value
        for value in vars(torch).values()
        if type(value) is torch.dtype
    },
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """One of the known classes. Dotted names, which reach into a module's imports, are none of them."""
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's metadata") from None


def read_metadata(file: BinaryIO) -> Metadata:
    """The metadata of a distributed checkpoint.

    Raises:
        pickle.UnpicklingError: it is damaged, names what does not belong there, or is something else.
    """
    try:
        content = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as error:
        # A damaged pickle gives the unpickler wrong types, and any error.
        raise pickle.UnpicklingError(f"it is damaged: {' '.join(str(error).split())[:80]}") from error
    if type(content) is not Metadata:
        raise pickle.UnpicklingError(f"it holds a {type(content).__name__} instead of metadata")
    return content


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
