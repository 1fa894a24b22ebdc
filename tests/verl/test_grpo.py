"""verl's trainer for reinforcement learning with our engine: a GRPO loop on two processes, with a stand-in rollout."""

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from cpu_rollout import recorded
from grpo import SAMPLES, STEPS, run_trainer

RANKS = 2
pytest.importorskip("transfer_queue", reason="verl's trainer needs TransferQueue")


def test_grpo_loop_and_resume(model_folder: Path, tmp_path: Path):
    """Three steps; the rollout servers sample with the trained weights; then one more step from the checkpoint."""
    changes = {
        "trainer.save_freq": 1,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }
    steps = run_trainer(model_folder, tmp_path, RANKS, changes)
    assert [step["training/global_step"] for step in steps] == [1, 2, 3][:STEPS]
    for number, step in enumerate(steps, start=1):
        _check_metrics(number, step)
    _check_weights(model_folder, tmp_path, STEPS)

    resumed = run_trainer(model_folder, tmp_path, RANKS, {"trainer.total_training_steps": STEPS + 1})
    assert [step["training/global_step"] for step in resumed] == [STEPS + 1]
    _check_metrics(STEPS + 1, resumed[0])
    last = _trained(tmp_path, STEPS)
    for rank in range(RANKS):
        # Sent again after loading the checkpoint, before the first step.
        assert _equal(_received(tmp_path, rank, STEPS), last)
        assert not _equal(_received(tmp_path, rank, STEPS + 1), last)


def _check_metrics(number: int, step: dict[str, Any]) -> None:
    for name in ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy"):
        assert math.isfinite(step[name]), name
    assert step["actor/grad_norm"] > 0
    # Every prompt is computed once on a rank for all of its samples.
    assert 1 < step["actor/tree/token_reuse"] < SAMPLES
    # The rollout's logprobs are those of transformers with the weights that it received.
    assert step["training/rollout_probs_diff_valid"] == 1
    assert step["training/rollout_probs_diff_max"] < 1e-5
    # The reference has the initial weights.
    assert step["actor/kl_loss"] == pytest.approx(0, abs=1e-6) if number == 1 else step["actor/kl_loss"] > 1e-4


def _check_weights(model_folder: Path, folder: Path, steps: int) -> None:
    """What the servers received is what was trained; each step changed it."""
    before = _load(model_folder)
    for step in range(steps + 1):
        expected = before if step == 0 else _trained(folder, step)
        for rank in range(RANKS):
            assert _equal(_received(folder, rank, step), expected)
        if step:
            assert all(not torch.equal(expected[name], before[name]) for name in expected)
        before = expected


def _received(folder: Path, rank: int, step: int) -> dict[str, Tensor]:
    return torch.load(recorded(folder / "received", rank, step))


def _trained(folder: Path, step: int) -> dict[str, Tensor]:
    return _load(folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface")


def _load(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def _equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
