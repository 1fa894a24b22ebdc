"""The unpickler of checkpoint metadata: it reads what PyTorch writes, and runs nothing that a file names."""

from __future__ import annotations

import io
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.training.checkpoint.plain_values import load_values
from megatron_dta.training.checkpoint.restricted_pickle import read_metadata
from strict_pickle_cases import ATTACKS, Bomb, metadata


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_as_python_reads_it(protocol: int) -> None:
    content = pickle.dumps(metadata(), protocol)
    found = read_metadata(io.BytesIO(content))
    expected = pickle.loads(content)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.state_dict_metadata["a"].properties.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_else_is_read_or_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pickle.UnpicklingError) as caught:
        read_metadata(io.BytesIO(ATTACKS[name]))
    assert len(str(caught.value)) < 300
    assert list(tmp_path.iterdir()) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


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
    assert torch.equal(load_values(io.BytesIO(content))["a"], torch.ones(3))
    for content, message in (
        (saved([Bomb()]), "weights_only"),
        (pickle.dumps(Bomb()), "was not written by torch.save"),
        (packed_zeros(), "unpack to"),
        (b"", "was not written by torch.save"),
    ):
        with pytest.raises(pickle.UnpicklingError, match=message):
            load_values(io.BytesIO(content))
    assert list(tmp_path.iterdir()) == []


def archive(values: bytes) -> bytes:
    """An archive of ``torch.save`` with one number, and with the pickle ``values`` in the place of its own."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(1)))) as plain, zipfile.ZipFile(target, "w") as other:
        for name in plain.namelist():
            other.writestr(name, values if name.endswith(".pkl") else plain.read(name))
    return target.getvalue()


# A number in a pair with itself, that pair in a pair with itself, and so on.
PAIRS = b"K\x01" + b"".join(b"q%bh%b\x86" % (bytes([i]), bytes([i])) for i in range(1, 61))
# Remembered twice, so that the name that is used does not follow what it names.
LISTS = b"]" + b"".join(b"q\xc8q%c]h%cah%ca" % (i, i, i) for i in range(1, 61))


class Claim:
    def __reduce__(self) -> tuple:
        return bytearray, (1 << 33,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: saved({"a": Claim()}), "holds .*bytearray"),
        (lambda: archive(b"\x80\x02}" + PAIRS + b"K\x01s."), "repeats its parts"),
        (lambda: archive(b"\x80\x02" + LISTS + b"."), "repeats its parts"),
        (lambda: saved(torch.zeros(1).expand(1 << 28)), "bytes claim a tensor of"),
    ],
    ids=["bytes", "key", "lists", "expanded"],
)
def test_small_files_claim_and_repeat_nothing(content: Any, message: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pickle.UnpicklingError, match=message):
        load_values(io.BytesIO(content()))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_pytorchs_reader_of_checkpoints_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that resuming takes."""
    monkeypatch.chdir(tmp_path)
    megatron_patches.read_checkpoints_without_running_them()
    megatron_patches.read_checkpoints_without_running_them()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata()))
    assert FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == {"a", "b"}
    (folder / ".metadata").write_bytes(ATTACKS["dotted"])
    with pytest.raises(pickle.UnpicklingError, match="does not belong into a checkpoint's metadata"):
        FileSystemReader(folder).read_metadata()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
