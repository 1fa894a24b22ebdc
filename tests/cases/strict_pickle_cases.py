"""Metadata as PyTorch writes it, and pickles that would run code."""

from __future__ import annotations

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
    "dotted with a prefix": dotted("torch.distributed.checkpoint.metadata", "torch.os.system"),
    "Megatron's": dotted("megatron.core.dist_checkpointing.strategies.torch", "pickle.loads"),
    "in the module": dotted("torch.distributed.checkpoint.filesystem", "os"),
    "another module": dotted("os", "system"),
    "a submodule": dotted("torch.distributed.checkpoint.format_utils", "dcp_to_torch_save"),
    "builtins": dotted("builtins", "eval"),
    "old protocol": b"cos\nsystem\n(S'touch exploded'\ntR.",
    "instance": b"(S'touch exploded'\nios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"Pexploded\n.",
    "a class changed": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}X\x08\0\0\0__hash__Ns\x86b.",
    "a list": pickle.dumps([1, 2]),
    "a number": pickle.dumps(7),
    "records alone": pickle.dumps(_StorageInfo("x", 0, 1)),
    "no tables": pickle.dumps(metadata(state_dict_metadata=None)),
    "other entries": pickle.dumps(metadata(state_dict_metadata={"a": 5})),
    "no place": pickle.dumps(metadata(storage_data={MetadataIndex("a"): 3})),
    "a path away": pickle.dumps(metadata(storage_data={MetadataIndex("a"): _StorageInfo("../x.distcp", 0, 1)})),
    "a path with NUL": pickle.dumps(metadata(storage_data={MetadataIndex("a"): _StorageInfo("x\0", 0, 1)})),
    "negative": pickle.dumps(metadata(storage_data={MetadataIndex("a"): _StorageInfo("x", -1, 1)})),
    "transformed": pickle.dumps(metadata(storage_data={MetadataIndex("a"): _StorageInfo("x", 0, 1, ["zstd"])})),
    "no shape": pickle.dumps(
        metadata(state_dict_metadata={"a": TensorStorageMetadata(TensorProperties(), (4, "x"), [])})
    ),
    "empty": b"",
    "cut": pickle.dumps(metadata())[:-40],
    # Python's unpickler in C takes 32 GB for this position in its memory.
    "far memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "long text": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
    "long bytes": b"\x80\x05\x96" + (1 << 35).to_bytes(8, "little") + b"x.",
    "shape of a shape": b"\x80\x02ctorch\nSize\n" + b"K\x01\x85" * 40 + b"\x85R.",
    # Hashing it overflows the stack; hashing the next never ends.
    "deep key": b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.",
    "wide key": b"\x80\x02}N" + b"2\x86" * 200 + b"Ns.",
    "deep value": b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
    # What is used again and again takes its time and memory each time.
    "large shapes": b"\x80\x02(" + b"K\x01" * 100_000 + b"tq\x000" + b"ctorch\nSize\nh\x00\x85R" * 1000 + b".",
    "large key": b"\x80\x02}\x8b"
    + (1_000_000).to_bytes(4, "little")
    + b"\x01" * 1_000_000
    + b"q\x00K\x01s"
    + b"h\x00K\x01s" * 20_000
    + b".",
    "large states": b"\x80\x02}("
    + b"".join(b"X\x06\0\0\0%06dN" % number for number in range(100_000))
    + b"uq\x000"
    + b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n)\x81h\x00b" * 1000
    + b".",
    "large paths": b"\x80\x02(" + b"X\x01\0\0\0a" * 100_000 + b"tq\x000" + b"cpathlib\nPosixPath\nh\x00R" * 1000 + b".",
    "the same chunks": pickle.dumps(
        metadata(
            state_dict_metadata=dict.fromkeys(
                map(str, range(10_000)),
                TensorStorageMetadata(
                    TensorProperties(), torch.Size((1,)), [ChunkStorageMetadata((0,), (1,))] * 10_000
                ),
            )
        )
    ),
}


class Bomb:
    def __reduce__(self) -> tuple:
        return os.system, ("touch exploded",)
