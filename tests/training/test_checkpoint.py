"""Checkpoints: saves that are interrupted, weights alone, and files that are damaged or that others may write."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from checkpoint_cases import MODEL, Run
from conftest import assert_equal_tensors, seed_all
from conversion_cases import save_huggingface, to_megatron
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.build import build_model
from megatron_dta.training.checkpoint import save_load as checkpoint
from megatron_dta.training.checkpoint import writer as checkpoint_writer
from megatron_dta.training.checkpoint.files import TRACKER, find_checkpoint, remove_leftovers
from megatron_dta.training.checkpoint.integrity import (
    CHECKSUMS,
    read_checksums,
    refuse_foreign_checkpoint,
    verify_checksums,
    write_checksums,
)
from megatron_dta.training.checkpoint.save_load import CheckpointSaver, load_weights, save_weights
from megatron_dta.training.config import CheckpointConfig
from strict_pickle_cases import Bomb
from tool_runs import run_tool

BF16 = replace(MODEL, bf16=True, params_dtype=torch.bfloat16)


def test_weights_alone(tmp_path: Path) -> None:
    """--finetune: also from a checkpoint without our state, and into another dtype."""
    run = Run(1)
    full, bare = run.save(tmp_path / "full", 4), tmp_path / "bare"
    bare.mkdir()
    dist_checkpointing.save({"model": run.model.sharded_state_dict()}, str(bare))
    save_weights(tmp_path / "reference", run.config, run.model)
    for path in (full, bare, tmp_path / "reference"):
        assert find_checkpoint(path) == path
        other = build_model(MODEL, torch.device("cpu"))
        load_weights(path, MODEL, other)
        assert_equal_tensors(dict(other.named_parameters()), run.weights())
    rounded = build_model(BF16, torch.device("cpu"))
    load_weights(full, BF16, rounded)
    halves = {name: values.bfloat16() for name, values in run.weights().items()}
    assert_equal_tensors(dict(rounded.named_parameters()), halves)
    with pytest.raises(InputError, match="add --finetune"):
        run.load(bare)
    with pytest.raises(InputError, match="--hidden-size is 24 there and 48 here"):
        load_weights(full, replace(MODEL, hidden_size=48), rounded)
    wide = replace(MODEL, hidden_size=48, kv_channels=16)
    with pytest.raises(InputError, match="the checkpoint cannot be read"):
        load_weights(bare, wide, build_model(wide, torch.device("cpu")))


def test_missing_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "nowhere") is None
    assert find_checkpoint(tmp_path) is None
    run = Run(1)
    run.save(tmp_path, 1)
    run.save(tmp_path, 2)
    (tmp_path / TRACKER).write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    message = "which is missing or incomplete; write the number of another one into it: iter_0000001, iter_0000002"
    with pytest.raises(InputError, match=f"names iter_0000003, {message}$"):
        find_checkpoint(tmp_path)
    (tmp_path / TRACKER).write_text("2")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    (tmp_path / TRACKER).write_text("seven")
    with pytest.raises(InputError, match="holds 'seven' instead of the number"):
        find_checkpoint(tmp_path)


def test_corrupt_checkpoints(tmp_path: Path) -> None:
    """Without checksums: whatever the readers of Megatron and PyTorch raise is one line that names the checkpoint."""
    run = Run(1)
    path = run.save(tmp_path, 1)
    (path / "checksums.json").unlink()
    for file in path.iterdir():
        content = file.read_bytes()
        for damaged in (content[: len(content) // 2], b""):
            file.write_bytes(damaged)
            with pytest.raises(InputError, match="iter_0000001") as caught:
                run.load(path)
            assert "\n" not in str(caught.value)
        file.write_bytes(content)


def test_an_interrupted_save_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at every step of a save in turn; each time the folder still holds step 1, and the save can be repeated."""
    run = Run(1)
    run.save(tmp_path, 1)
    before = run.weights()
    run.step()

    def fail(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.dist_checkpointing, "save", full)
        with pytest.raises(InputError, match=r"iter_0000002: the checkpoint cannot be written .*No space left"):
            run.save(tmp_path, 2)
    for module, name in (("dist_checkpointing", "save"), ("os", "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(checkpoint_writer, module), name, fail)
            with pytest.raises(KeyboardInterrupt):
                run.save(tmp_path, 2)
        assert find_checkpoint(tmp_path).name == "iter_0000001"
        assert list(tmp_path.glob("*.tmp"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "replace_text", fail)
        with pytest.raises(KeyboardInterrupt):
            run.save(tmp_path, 2)
    assert (tmp_path / "iter_0000002").exists()
    assert find_checkpoint(tmp_path).name == "iter_0000001"
    (tmp_path / "iter_0000002.tmp").mkdir()
    (tmp_path / f"{TRACKER}.tmp").write_text("")
    remove_leftovers(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    other = Run(2)
    other.load(find_checkpoint(tmp_path))
    assert_equal_tensors(other.weights(), before)
    run.save(tmp_path, 2)
    other.load(find_checkpoint(tmp_path))
    assert_equal_tensors(other.weights(), run.weights())
    shutil.rmtree(tmp_path)


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
