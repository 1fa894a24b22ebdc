"""Reads the pickles of a checkpoint without executing code that they name.

A pickle is a program that may call anything it can import. PyTorch stores the metadata of a distributed checkpoint as a
pickle (``.metadata``) and lets it import everything. This reader builds only the classes of such metadata, by exact
module and name, from plain values, and then checks that the result is metadata. Sizes in the file cause no allocation
before the corresponding bytes have been read.

PyTorch's weights-only unpickler, which reads everything else (``plain_values``), does not know the pickle protocol in
which PyTorch writes metadata.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


@dataclass
class _OlderMetadata(Metadata):
    """``MCoreMetadata`` of Megatron-Core up to 0.15; its additional entries are not used."""


class _OlderPlan:
    """A placeholder for ``MCoreSavePlan`` of these versions, which is not used."""


def _members(module: Any, *names: str) -> dict[tuple[str, str], Any]:
    return {(module.__name__, name): getattr(module, name) for name in names if hasattr(module, name)}


# Classes whose instances take their state from the pickle.
_RECORDS = (
    _members(metadata, "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")
    | _members(metadata, "ChunkStorageMetadata", "TensorProperties", "StorageMeta")
    | _members(filesystem, "_StorageInfo", "_StoragePrefix")
    | _members(planner, "SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
    | {(_MEGATRON, "MCoreMetadata"): _OlderMetadata, (_MEGATRON, "MCoreSavePlan"): _OlderPlan}
)
_ENUMS = _members(metadata, "_MEM_FORMAT_ENCODING") | _members(planner, "WriteItemType")
_PATHS = {
    (module, name): pathlib.PurePosixPath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath")
}
_LAYOUT = {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
_DTYPES = {
    ("torch", str(dtype).removeprefix("torch.")): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_OTHERS = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}
_NAMES: dict[tuple[str, str], Any] = {**_RECORDS, **_ENUMS, **_PATHS, **_LAYOUT, **_DTYPES, **_OTHERS}
_RECORD_CLASSES = frozenset(_RECORDS.values())
_ALL_OF_TYPE: dict[Any, type] = {
    **dict.fromkeys(_PATHS.values(), str),
    **dict.fromkeys(_LAYOUT.values(), str),
    **dict.fromkeys(_ENUMS.values(), int),
}

# Largest number of axes of a tensor, of parts of a path and of fields of a record, and length of a part.
_MOST_AXES, _MOST_PARTS, _LONGEST_PART = 64, 64, 4096


class _MetadataUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Builds metadata and nothing else.

    It derives from Python's unpickler written in Python, since the C version allocates memory for any size that a
    damaged file states. Only flat values are hashed, so that hashing cannot take forever or overflow the stack.
    """

    # Opcodes that build objects which metadata does not contain are removed. Sizes are bounded, since a part that is
    # used again and again takes as much time and memory each time.
    dispatch = {  # noqa: RUF012 (as the base class has it)
        code: load
        for code, load in pickle._Unpickler.dispatch.items()  # type: ignore[attr-defined]
        if bytes([code])
        not in {
            *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
            *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX),
            *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
            *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
        }
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the known classes. Dotted names, which reach into a module's imports, are refused."""
        try:
            return _NAMES[module, name]
        except KeyError:
            raise _refused(f"{module}.{name}") from None

    def load_reduce(self) -> None:
        """Call a known function with arguments that it takes."""
        function, arguments = self.stack[-2:]
        if function is torch.Size:
            fits = len(arguments) == 1 and _is_shape(arguments[0])
        elif function is OrderedDict:
            fits = arguments == ()
        else:
            # No flag is a number here: a dtype or a class may stand where a function should.
            kind = next((kind for known, kind in _ALL_OF_TYPE.items() if function is known), None)
            fits = kind is not None and type(arguments) is tuple and len(arguments) <= _MOST_PARTS
            fits = fits and all(type(each) is kind and _is_short(each) for each in arguments)
        if not fits:
            raise _refused(f"a call of {_name_of(function)}")
        super().load_reduce()

    def load_newobj(self) -> None:
        """Make an empty record."""
        made, arguments = self.stack[-2:]
        if not (isinstance(made, type) and made in _RECORD_CLASSES and arguments == ()):
            raise _refused(f"an instance of {_name_of(made)}")
        super().load_newobj()

    def load_build(self) -> None:
        """Fill a record."""
        record, state = self.stack[-2:]
        if type(record) not in _RECORD_CLASSES:
            raise _refused(f"a state of {_name_of(type(record))}")
        if type(state) is not dict and not (type(record) is TensorProperties and type(state) is tuple):
            raise _refused(f"a state of the type {type(state).__name__}")
        if len(state) > _MOST_PARTS:
            raise _refused(f"a state with {len(state)} fields")
        super().load_build()

    def load_setitem(self) -> None:
        """Add an entry to a dictionary."""
        self._check_keys(self.stack[-3], self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Add entries to a dictionary."""
        # The entries are on the stack, what was there before on the stack of stacks.
        self._check_keys(self.metastack[-1][-1], self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        """Make a dictionary."""
        self._check_keys({}, self.stack[::2])
        super().load_dict()

    @staticmethod
    def _check_keys(target: Any, keys: list[Any]) -> None:
        if type(target) not in (dict, OrderedDict) or not all(_is_flat(key) for key in keys):
            raise _refused("an entry that no table of metadata has")

    for code, load in (
        (pickle.REDUCE, load_reduce),
        (pickle.NEWOBJ, load_newobj),
        (pickle.BUILD, load_build),
        (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems),
        (pickle.DICT, load_dict),
    ):
        dispatch[code[0]] = load
    del code, load


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"{what} does not belong into a checkpoint's metadata")


def _name_of(something: Any) -> str:
    return getattr(something, "__name__", type(something).__name__)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) <= _MOST_AXES and all(_is_count(each) for each in value)


def _is_short(value: Any) -> bool:
    """Whether an int or a string takes little time to use."""
    return len(value) <= _LONGEST_PART if type(value) is str else abs(value) < 1 << 63


def _is_flat(key: Any) -> bool:
    """Whether a key contains only strings and numbers."""
    if type(key) is not MetadataIndex:
        return type(key) in (str, int) and _is_short(key)
    held = vars(key)
    return (
        type(held.get("fqn")) is str
        and (held.get("offset") is None or type(held["offset"]) is torch.Size)
        and (held.get("index") is None or _is_count(held["index"]))
    )


def read_metadata(file: BinaryIO) -> Metadata:
    """The metadata of a distributed checkpoint.

    Raises:
        pickle.UnpicklingError: it is damaged, names what does not belong there, or is something else.
    """
    try:
        content = file.read()
        found = _MetadataUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, OSError):
        raise
    except EOFError:
        raise pickle.UnpicklingError("it ends too early") from None
    except Exception as error:
        # A damaged pickle gives the unpickler's own code wrong types, and any error.
        raise pickle.UnpicklingError(f"it is damaged: {' '.join(str(error).split())[:80]}") from error
    if type(found) not in (Metadata, _OlderMetadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__} instead of metadata")
    _check_metadata(found, len(content))
    return found


def _check_metadata(found: Metadata, size: int) -> None:
    """Refuse metadata of ``size`` bytes whose parts have types that PyTorch does not write, or are repeated."""
    held = vars(found)
    described, stored = held.get("state_dict_metadata"), held.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise pickle.UnpicklingError("its tables of tensors and files are missing")
    if type(held.get("storage_meta")) not in (type(None), StorageMeta):
        raise pickle.UnpicklingError("its storage_meta is of another type")
    if sum(len(getattr(entry, "chunks", ())) for entry in described.values()) > size:
        raise pickle.UnpicklingError("it repeats its parts without end")
    for name, entry in described.items():
        if type(name) is not str or not _is_storage(entry):
            raise pickle.UnpicklingError(f"its entry {str(name)[:80]!r} describes no tensor")
    for index, place in stored.items():
        if type(index) is not MetadataIndex or not _is_place(place):
            raise pickle.UnpicklingError(f"its entry {str(getattr(index, 'fqn', index))[:80]!r} is in no file")


def _is_storage(entry: Any) -> bool:
    if type(entry) is BytesStorageMetadata:
        return True
    if type(entry) is not TensorStorageMetadata:
        return False
    held = vars(entry)
    size, chunks, properties = held.get("size"), held.get("chunks"), held.get("properties")
    return (
        type(size) is torch.Size
        and type(chunks) is list
        and type(properties) is TensorProperties
        and type(vars(properties).get("dtype")) is torch.dtype
        and all(type(chunk) is ChunkStorageMetadata and _is_chunk_of(vars(chunk), size) for chunk in chunks)
    )


def _is_chunk_of(chunk: dict[str, Any], size: torch.Size) -> bool:
    offsets, sizes = chunk.get("offsets"), chunk.get("sizes")
    return (
        type(offsets) is torch.Size
        and type(sizes) is torch.Size
        and len(offsets) == len(sizes) == len(size)
        and all(start + length <= whole for start, length, whole in zip(offsets, sizes, size, strict=True))
    )


def _is_place(place: Any) -> bool:
    """Whether ``place`` is a section of a file in the checkpoint's own folder."""
    if type(place) is not _StorageInfo:
        return False
    held = vars(place)
    name = held.get("relative_path")
    return (
        type(name) is str
        and name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and _is_count(held.get("offset"))
        and _is_count(held.get("length"))
        and not held.get("transform_descriptors")
    )
