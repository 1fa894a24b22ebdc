"""The unpickler of checkpoint metadata: it reads what PyTorch writes, and runs nothing that a file names."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.training.checkpoint.restricted_pickle import read_metadata
from strict_pickle_cases import ATTACKS, metadata


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_is_read_as_python_reads_it(protocol: int) -> None:
    content = pickle.dumps(metadata(), protocol)
    loaded, expected = read_metadata(io.BytesIO(content)), pickle.loads(content)
    assert loaded.state_dict_metadata == expected.state_dict_metadata
    assert loaded.storage_data == expected.storage_data


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_else_is_read_or_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch's reader of checkpoints reads, as when a run resumes."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        read_metadata(io.BytesIO(ATTACKS[name]))
    megatron_patches.read_checkpoints_without_running_them(read_metadata)
    (tmp_path / ".metadata").write_bytes(ATTACKS[name])
    with pytest.raises(pickle.UnpicklingError):
        FileSystemReader(tmp_path).read_metadata()
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]
