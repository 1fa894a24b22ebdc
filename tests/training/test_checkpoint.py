"""Checkpoints: a restored run takes the same next step as the saved one, and invalid ones are refused."""

from __future__ import annotations

import multiprocessing
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from checkpoint_cases import MODEL, RATES, Run
from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.training.checkpoint import save_load as checkpoint
from megatron_dta.training.checkpoint import writer as checkpoint_writer
from megatron_dta.training.checkpoint.files import TRACKER, find_checkpoint, remove_leftovers
from megatron_dta.training.checkpoint.save_load import load_weights, save_weights
from megatron_dta.training.data.step import StepSamples, pack_steps, unpack_steps

BF16 = replace(MODEL, bf16=True, params_dtype=torch.bfloat16)


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert torch.equal(values, right[name]), name


@pytest.mark.parametrize("model", [MODEL, BF16], ids=["fp32", "bf16"])
def test_the_restored_run_takes_the_same_steps(tmp_path: Path, model: ModelConfig) -> None:
    seed = int(seed_all(7).integers(1 << 30))
    straight = Run(seed, model)
    for _ in range(3):
        straight.step()
    straight.save(tmp_path, 3)
    expected = [straight.step() for _ in range(3)]

    restored = Run(seed + 1, model)
    restored.step()
    path = find_checkpoint(tmp_path)
    assert path == tmp_path / "iter_0000003"
    assert restored.load(path) == (3, {}, [])
    assert [restored.step() for _ in range(3)] == expected
    assert_same_weights(restored.weights(), straight.weights())
    assert restored.optimizer.learning_rate == straight.optimizer.learning_rate
    assert all(applied for *_, applied in expected)
    assert not multiprocessing.active_children()


def test_steps_in_waiting_survive(tmp_path: Path) -> None:
    rng = seed_all(5)

    def sample(fields: bool) -> TrainingSample:
        length = int(rng.integers(2, 9))
        numbers = [rng.standard_normal(length).astype(np.float32) if fields else None for _ in range(2)]
        mask = np.arange(length) >= rng.integers(1, length)
        return TrainingSample(rng.integers(0, 37, length).astype(np.int32), mask, *numbers)

    steps = [
        StepSamples([sample(fields) for _ in range(count)], {"reward": float(rng.random()), "rollouts": float(count)})
        for count, fields in ((3, True), (1, False), (4, True))
    ]
    run = Run(3)
    run.save(tmp_path, 1, {"rollout_batches": 2, "waiting": pack_steps(steps)})
    _, progress, _ = run.load(find_checkpoint(tmp_path))
    unpacked = unpack_steps(progress["waiting"])
    assert progress["rollout_batches"] == 2
    assert [step.statistics for step in unpacked] == [step.statistics for step in steps]
    for step, expected in zip(unpacked, steps, strict=True):
        for left, right in zip(step.samples, expected.samples, strict=True):
            for name in ("token_ids", "loss_mask", "advantages", "old_logprobs", "ref_logprobs"):
                values, wanted = getattr(left, name), getattr(right, name)
                assert (values is None) == (wanted is None), name
                if wanted is not None:
                    assert values.dtype == wanted.dtype, name
                    assert np.array_equal(values, wanted), name


def test_changed_rates_hold_and_are_reported(tmp_path: Path) -> None:
    run = Run(1)
    run.step()
    run.save(tmp_path, 1)
    other = Run(1, rates=replace(RATES, lr=7e-2, lr_decay_style="constant", min_lr=0.0, lr_warmup_iters=0))
    _, _, changed = other.load(find_checkpoint(tmp_path))
    assert "--lr: 0.003 before, 0.07 now" in changed
    assert "--lr-decay-style: cosine before, constant now" in changed
    assert other.optimizer.learning_rate == 7e-2
    other.step()
    assert other.optimizer.learning_rate == 7e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "--num-layers is 2 there and 3 here"),
        ({"params_dtype": torch.bfloat16}, "the dtype (--bf16) is torch.float32 there and torch.bfloat16 here"),
    ],
)
def test_checkpoint_of_another_model(tmp_path: Path, change: dict, message: str) -> None:
    run = Run(1)
    path = run.save(tmp_path, 1)
    run.config = replace(run.config, model=replace(MODEL, **change))
    with pytest.raises(InputError, match=re.escape(f"checkpoint of another model: {message}")) as caught:
        run.load(path)
    assert "\n" not in str(caught.value)


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
