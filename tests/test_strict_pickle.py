"""The unpickler of checkpoint metadata: it reads what PyTorch writes, and runs nothing that a file names."""

from __future__ import annotations

import io
import os
import pickle
import resource
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
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

from megatron_dta import cpu_compat
from megatron_dta.conversion.strict_pickle import load_values, read_metadata


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


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_as_python_reads_it(protocol: int) -> None:
    content = pickle.dumps(metadata(), protocol)
    found = read_metadata(io.BytesIO(content))
    expected = pickle.loads(content)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.state_dict_metadata["a"].properties.dtype is torch.bfloat16


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
    # Hashing it overflows the stack; hashing the next takes for ever.
    "deep key": b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.",
    "wide key": b"\x80\x02}N" + b"2\x86" * 200 + b"Ns.",
    "deep value": b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_else_is_read_or_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pickle.UnpicklingError) as caught:
        read_metadata(io.BytesIO(ATTACKS[name]))
    assert len(str(caught.value)) < 300
    assert list(tmp_path.iterdir()) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


class Bomb:
    def __reduce__(self) -> tuple:
        return os.system, ("touch exploded",)


def saved(values: object) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def packed_zeros() -> bytes:
    """An archive of ``torch.save`` whose storage is packed, 1000 to 1."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.zeros(1 << 20)))) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in plain.namelist():
            target.writestr(name, plain.read(name))
    return packed.getvalue()


def test_values_that_could_run_code_or_unpack_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = saved({"a": torch.ones(3), "b": [None, "x"]})
    assert torch.equal(load_values(io.BytesIO(content), len(content))["a"], torch.ones(3))
    for content, message in (
        (saved([Bomb()]), "weights_only"),
        (pickle.dumps(Bomb()), "was not written by torch.save"),
        (packed_zeros(), "unpack to"),
        (b"", "was not written by torch.save"),
    ):
        with pytest.raises(pickle.UnpicklingError, match=message):
            load_values(io.BytesIO(content), len(content))
    assert list(tmp_path.iterdir()) == []


def test_pytorchs_reader_of_checkpoints_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that resuming takes."""
    monkeypatch.chdir(tmp_path)
    cpu_compat.read_checkpoints_without_running_them()
    cpu_compat.read_checkpoints_without_running_them()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata()))
    assert FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == {"a", "b"}
    (folder / ".metadata").write_bytes(ATTACKS["dotted"])
    with pytest.raises(pickle.UnpicklingError, match="does not belong into a checkpoint's metadata"):
        FileSystemReader(folder).read_metadata()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
