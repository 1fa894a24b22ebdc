"""Metadata as PyTorch writes it, and pickles that would run code."""

import os
import pickle
from pathlib import Path

import torch
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


def metadata(**changes: object) -> Metadata:
    size, offsets = torch.Size((4, 3)), torch.Size((2, 0))
    chunk = ChunkStorageMetadata(offsets, torch.Size((2, 3)))
    properties = TensorProperties(dtype=torch.bfloat16)
    described = {"a": TensorStorageMetadata(properties, size, [chunk]), "b": BytesStorageMetadata()}
    stored = {
        MetadataIndex("a", offsets, 0): _StorageInfo("__0_0.distcp", 0, 700),
        MetadataIndex("b"): _StorageInfo("__0_1.distcp", 5, 9),
    }
    content = {"state_dict_metadata": described, "storage_data": stored, "storage_meta": StorageMeta(Path("x"), "id")}
    return Metadata(**{**content, **changes})


def dotted(module: str, name: str) -> bytes:
    """A pickle of protocol 4 that calls what a dotted name reaches through a module."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93\x8c\x0etouch exploded\x85R."


ATTACKS = {
    "dotted": dotted("torch.distributed.checkpoint.filesystem", "os.system"),
    "another module": dotted("os", "system"),
    "builtins": dotted("builtins", "eval"),
    "old protocol": b"cos\nsystem\n(S'touch exploded'\ntR.",
    "instance": b"(S'touch exploded'\nios\nsystem\n.",
    "a number": pickle.dumps(7),
    "cut": pickle.dumps(metadata())[:-40],
    "empty": b"",
}


class Bomb:
    def __reduce__(self) -> tuple:
        return os.system, ("touch exploded",)
