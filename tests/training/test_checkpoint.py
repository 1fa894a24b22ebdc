"""Checkpoints: a restored run takes the same next step as the saved one, and invalid ones are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from checkpoint_cases import MODEL, Run
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.build import build_model
from megatron_dta.training.checkpoint import save_load as checkpoint
from megatron_dta.training.checkpoint import writer as checkpoint_writer
from megatron_dta.training.checkpoint.files import TRACKER, find_checkpoint, remove_leftovers
from megatron_dta.training.checkpoint.save_load import load_weights, save_weights

BF16 = replace(MODEL, bf16=True, params_dtype=torch.bfloat16)


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert torch.equal(values, right[name]), name


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
        assert_same_weights(dict(other.named_parameters()), run.weights())
    rounded = build_model(BF16, torch.device("cpu"))
    load_weights(full, BF16, rounded)
    for name, values in run.weights().items():
        assert torch.equal(dict(rounded.named_parameters())[name], values.bfloat16())
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
    assert_same_weights(other.weights(), before)
    run.save(tmp_path, 2)
    other.load(find_checkpoint(tmp_path))
    assert_same_weights(other.weights(), run.weights())
    shutil.rmtree(tmp_path)
