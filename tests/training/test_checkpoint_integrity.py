"""Checksums of checkpoints: training and the converter detect changed bytes when loading."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_cases import MODEL, Run
from conftest import seed_all
from conversion_cases import save_huggingface, to_megatron
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.integrity import (
    CHECKSUMS,
    read_checksums,
    refuse_foreign_checkpoint,
    verify_checksums,
    write_checksums,
)
from megatron_dta.training.checkpoint.save_load import CheckpointSaver, load_weights
from megatron_dta.training.config import CheckpointConfig
from strict_pickle_cases import Bomb
from tool_runs import run_tool


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << (position % 8)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run, and its folder with a checkpoint."""
    folder, run = tmp_path_factory.mktemp("saved"), Run(1)
    run.step()
    settings = CheckpointConfig(save=str(folder), async_save=True)
    saver = CheckpointSaver(replace(run.config, checkpoint=settings), run.model, run.optimizer)
    saver.save(1, {})
    saver.finish()
    return run, folder


def test_every_file_has_a_checksum(saved: tuple[Run, Path]) -> None:
    path = find_checkpoint(saved[1])
    assert read_checksums(path).keys() == {file.name for file in path.iterdir()} - {CHECKSUMS}
    assert {name for name in read_checksums(path) if name.endswith(".distcp")}
    verify_checksums(path)


def test_changed_bytes_are_found(saved: tuple[Run, Path], tmp_path: Path) -> None:
    """Anywhere: in tensors too, where PyTorch reads other numbers without a word."""
    rng, (run, folder) = seed_all(4), saved
    shutil.copytree(folder, tmp_path / "copy")
    path = find_checkpoint(tmp_path / "copy")
    for file in sorted(path.iterdir()):
        for position in rng.integers(0, file.stat().st_size, 3):
            flip(file, int(position))
            with pytest.raises(InputError, match=r"iter_0000001") as caught:
                run.load(path)
            assert "\n" not in str(caught.value)
            flip(file, int(position))
    assert run.load(path)[0] == 1
    tensors = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    flip(tensors, tensors.stat().st_size // 2)
    with pytest.raises(
        InputError,
        match=rf"{tensors}: is damaged: \d+ bytes with checksum .*its number into latest_.*--skip-checkpoint",
    ):
        load_weights(path, MODEL, run.model)
    unchecked = replace(run.config, checkpoint=CheckpointConfig(skip_checkpoint_checks=True))
    run.config, checked = unchecked, run.config
    assert run.load(path)[0] == 1
    run.config = checked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"algorithm": "md5", "files": {}}', "has 'md5' checksums"),
        ('{"algorithm": "crc32", "files": {"a": [3, "00"]}}', "a: cannot be read"),
    ],
)
def test_damaged_lists(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / CHECKSUMS).write_text(content)
    with pytest.raises(InputError, match=message):
        verify_checksums(tmp_path)


def test_folders_that_others_may_write(saved: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = saved
    shutil.copytree(folder, tmp_path / "copy")
    path = find_checkpoint(tmp_path / "copy")
    for open_to_all in (path, path / ".metadata"):
        mode = open_to_all.stat().st_mode
        open_to_all.chmod(mode | 0o002)
        with pytest.raises(InputError, match=rf"{open_to_all}: every user may write to it; chmod -R go-w {path}"):
            run.load(path)
        open_to_all.chmod(mode)
    refuse_foreign_checkpoint(path)
    os.mkfifo(path / "__9_9.distcp")
    with pytest.raises(InputError, match="is neither a file nor a folder"):
        run.load(path)


def test_a_saved_checkpoint_is_closed_to_others(tmp_path: Path) -> None:
    """Whatever rights new files get."""
    (tmp_path / "a").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "a"):
        path.chmod(0o777)
    write_checksums(tmp_path, {"a": (1, "0")})
    assert {path.stat().st_mode & 0o022 for path in (tmp_path, *tmp_path.iterdir())} == {0}


def test_a_hostile_common_state_runs_nothing(saved: tuple[Run, Path], tmp_path: Path, monkeypatch) -> None:
    """Also where the environment asks PyTorch to believe files."""
    run, folder = saved
    shutil.copytree(folder, tmp_path / "copy")
    path = find_checkpoint(tmp_path / "copy")
    (path / CHECKSUMS).unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    run.load(path)
    torch.save({"iteration": Bomb()}, path / "common.pt")
    with pytest.raises(InputError, match="cannot be read"):
        run.load(path)
    assert not (tmp_path / "exploded").exists()


def test_the_converter_compares_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_huggingface(tmp_path / "hf", "qwen2", 60)
    checkpoint = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert read_checksums(checkpoint).keys() == {file.name for file in checkpoint.iterdir()} - {CHECKSUMS}
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    # A number in the middle of a tensor.
    for position in range(len(content) // 2, len(content)):
        if content[position : position + 64].count(0) == 0:
            break
    flip(file, position + 32)
    command = f"--load {tmp_path}/megatron --hf-checkpoint {tmp_path}/hf --save-hf {tmp_path}/out"
    with pytest.raises(InputError, match=f"{file.name}: is damaged"):
        run_tool(monkeypatch, "convert_megatron_to_hf", command)
    assert not (tmp_path / "out").exists()
    run_tool(monkeypatch, "convert_megatron_to_hf", f"{command} --skip-checkpoint-checks")
    assert (tmp_path / "out").exists()
