"""Files that may be hostile: others may write them, or checkpoint metadata names code to run."""

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from conftest import REPOSITORY
from megatron_dta.common import trust
from megatron_dta.common.trust import refuse_foreign
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.training.checkpoint.restricted_pickle import read_metadata
from strict_pickle_cases import ATTACKS, metadata


def fault_of(path: Path) -> str | None:
    try:
        refuse_foreign([path], "do this")
    except InputError as error:
        return str(error).removesuffix("; do this")
    return None


def test_what_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "inside" / "file"
    path.parent.mkdir()
    path.write_text("x")
    assert fault_of(path) is None
    assert fault_of(tmp_path / "missing") is None
    path.chmod(0o666)
    assert fault_of(path) == f"{path}: every user may write to it"
    path.chmod(0o664)
    monkeypatch.setattr(trust, "_is_own_group", lambda gid: False)
    assert fault_of(path) == f"{path}: its group may write to it"
    monkeypatch.setattr(trust, "_is_own_group", lambda gid: True)
    assert fault_of(path) is None
    # The folder around it, unless only owners may rename what it holds, as in /tmp.
    path.parent.chmod(0o777)
    assert fault_of(path) == f"{path.parent}: every user may replace what it holds"
    path.parent.chmod(0o1777)
    assert fault_of(path) is None
    assert fault_of(path.parent) == f"{path.parent}: every user may write to it"
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 54321)
    assert (fault_of(path) or "").startswith(f"{path}: belongs to another user") is (path.stat().st_uid != 0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert fault_of(pipe) == f"{pipe}: is neither a file nor a folder"


def test_a_library_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    """Neither from a folder that is open nor from a file that is."""
    code = "from megatron_dta.sampling.speculation.suffix_forest import SuffixForest\nSuffixForest(5, 2)"
    environment = {**os.environ, "MEGATRON_DTA_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=REPOSITORY, check=False
        )
        return done.stderr

    assert "may write" not in run()
    (library,) = tmp_path.glob("suffix_forest-*.so")
    library.write_bytes(b"hostile")
    library.chmod(0o666)
    assert f"{library}: every user may write to it; set MEGATRON_DTA_CACHE" in run()
    library.chmod(0o644)
    tmp_path.chmod(0o777)
    assert f"{tmp_path}: every user may write to it" in run()
    assert library.read_bytes() == b"hostile"


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
