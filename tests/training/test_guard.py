"""Gradient outliers, sampler mismatch and the best checkpoint, also across a restart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.checkpoint.best import BestCheckpoint, better_checkpoint
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.monitor.guard import LEAST_NORMS, Guard, GuardState
from resume_cases import rows_without_timing
from trainer_cases import make_trainer, run

VOCABULARY = 13
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --swiglu --disable-bias-linear "
    f"--max-position-embeddings 32 --vocab-size {VOCABULARY} --lr 1e-2"
)


def make_rollouts(rng: np.random.Generator, count: int, scales: list[float]) -> list[Rollout]:
    """One group a step, ``count`` rollouts each, their advantages of the step's scale; random logprobs."""
    rollouts = []
    for group, scale in enumerate(scales):
        for _ in range(count):
            length = int(rng.integers(4, 12))
            tokens, mask = rng.integers(0, VOCABULARY, length), np.arange(length) >= 2
            logprobs = np.where(mask, -3 * rng.random(length), 0)
            advantages = rng.standard_normal(length) * scale
            rollouts.append(Rollout(tokens, mask, advantages=advantages, logprobs=logprobs, group_id=f"g{group}"))
    return rollouts


@pytest.mark.parametrize("seed", range(2))
def test_outliers_are_those_of_a_slow_twin(seed: int) -> None:
    rng = seed_all(seed)
    window, factor = int(rng.integers(10, 20)), float(rng.uniform(1.5, 4))
    flags = f"--grad-norm-outlier-factor {factor} --grad-norm-outlier-window {window}"
    config = parse_arguments(f"{MODEL} --task arithmetic {flags}".split())
    lines: list[str] = []
    guard = Guard(config, GuardState(), lines.append)
    norms = rng.lognormal(0, 1, 120)
    norms[rng.random(120) < 0.05] = np.nan
    expected = []
    for step, norm in enumerate(norms):
        known = norms[:step][np.isfinite(norms[:step])][-window:]
        expected.append(len(known) >= LEAST_NORMS and bool(norm > factor * np.median(known)))
        record = guard.check_norm(step + 1, float(norm))
        assert record == {"grad_norm_outlier": expected[-1], "grad_norm_outliers": sum(expected)}
    assert 3 < sum(expected) == len(lines)
    assert "not skipped" in lines[0]


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_a_spike_is_told_or_skipped(tmp_path: Path, action: str) -> None:
    rng = seed_all(5)
    scales = [1.0] * 14 + [1e4]
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(rng, 4, scales))
    arguments = (
        f"--rollouts {tmp_path}/r.jsonl --global-batch-size 4 --train-iters 45 --save {tmp_path}/run "
        f"--grad-norm-outlier-factor 50 --grad-norm-outlier-action {action} --clip-grad 0"
    )
    trainer, output = make_trainer(arguments, MODEL)
    before: dict[int, torch.Tensor] = {}
    plain = trainer.optimizer.step

    def watched(loss: float, skip_above: float | None = None):
        old = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        outcome = plain(loss, skip_above)
        new = list(trainer.model.parameters())
        before[trainer.progress.iteration + 1] = any(not torch.equal(a, b) for a, b in zip(old, new, strict=True))
        return outcome

    trainer.optimizer.step = watched
    trainer.run()
    trainer.metrics.close()
    rows = rows_without_timing(tmp_path / "run")
    outliers = [row["iteration"] for row in rows if row["grad_norm_outlier"]]
    # The spike comes once an epoch; in the first one before enough norms are known, maybe.
    assert 2 <= len(outliers) <= 3
    for row in rows:
        spike = row["iteration"] in outliers
        assert row["skipped"] == (spike and action == "skip")
        assert before[row["iteration"]] == (not row["skipped"])
    assert output.getvalue().count("--grad-norm-outlier-factor 50 times the median") == len(outliers)
    assert rows[-1]["grad_norm_outliers"] == len(outliers)


def test_alarms_in_a_row_end_the_run(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(6), 3, [1.0] * 5))
    arguments = (
        f"--rollouts {tmp_path}/r.jsonl --global-batch-size 3 --train-iters 9 --save {tmp_path}/run --save-interval 2 "
        "--sampler-mismatch-alarm 1.01 --sampler-mismatch-stop 5 --async-save"
    )
    with pytest.raises(InputError, match=r"after step 5: .*\(--sampler-mismatch-stop 5\)"):
        run(arguments, MODEL)
    rows = rows_without_timing(tmp_path / "run")
    assert [row["sampler_mismatch_alarms"] for row in rows] == [1, 2, 3, 4, 5]
    assert find_checkpoint(tmp_path / "run").name == "iter_0000004"
    # The resumed run ends in the same way, because the counts are in the checkpoint.
    with pytest.raises(InputError, match="after step 5: "):
        run(arguments, MODEL)
    assert rows_without_timing(tmp_path / "run") == rows


def test_alarms_with_a_step_between_them_do_not_end_it() -> None:
    flags = "--task arithmetic --sampler-mismatch-alarm 1.5 --sampler-mismatch-stop 2"
    guard = Guard(parse_arguments(f"{MODEL} {flags}".split()), GuardState(), lambda line: None)
    for step, gap in enumerate([0.5, 0.1, 0.5, 0.4, float("inf")], start=1):
        record = guard.check_sampler(step, gap, True)
        later = guard.check_sampler(step, 9.0, False)
        assert "sampler_mismatch_alarm" not in later
        assert guard.must_stop is None or step == 5
    assert record["sampler_mismatch_alarms"] == 3
    assert record["sampler_probability_ratio"] == float("inf")
    assert guard.must_stop is None
    guard.check_sampler(6, 0.5, True)
    assert "--sampler-mismatch-stop 2" in guard.must_stop


def stored(folder: Path) -> str:
    """Training and held-out rollouts from different distributions: the held-out loss falls, then rises."""
    rng = seed_all(7)
    for name, count in (("train", 10), ("held_out", 6)):
        rollouts = []
        for i in range(count):
            tokens = np.concatenate([rng.integers(0, 2, 6), rng.integers(0, VOCABULARY, 3)])
            rollouts.append(Rollout(tokens, np.arange(9) >= 1, trajectory_id=str(i)))
        write_rollouts(folder / f"{name}.jsonl", rollouts)
    return (
        f"--objective sft --rollouts {folder}/train.jsonl --eval-rollouts {folder}/held_out.jsonl --eval-interval 2 "
        "--global-batch-size 5 --save-interval 3 --keep-checkpoints 1 --keep-best-checkpoint eval_loss --lr 0.05 "
        "--grad-norm-outlier-factor 3 --async-save"
    )


def test_the_best_checkpoint_stays_and_a_new_start_knows_it(tmp_path: Path) -> None:
    flags = stored(tmp_path)
    run(f"{flags} --train-iters 24 --save {tmp_path}/straight", MODEL)
    rows = rows_without_timing(tmp_path / "straight")
    judged = {row["iteration"]: row["eval_loss"] for row in rows if "eval_loss" in row and row["iteration"]}
    best = min(judged, key=judged.__getitem__)
    assert 0 < best < 24, "the held-out loss must rise again, or nothing is shown"
    named = json.loads((tmp_path / "straight" / "best_checkpoint.json").read_text())
    assert named == {
        "checkpoint": f"iter_{best:07d}",
        "iteration": best,
        "metric": "eval_loss",
        "value": judged[best],
    }
    left = sorted(path.name for path in (tmp_path / "straight").glob("iter_*"))
    assert left == [f"iter_{best:07d}", "iter_0000024"]
    for stop in (best, best + 1, 24):
        trainer, _ = make_trainer(f"{flags} --train-iters 24 --save {tmp_path}/stopped", MODEL)
        plain = trainer._step

        def stopping(plain=plain, trainer=trainer, stop=stop):
            record = plain()
            trainer.signals.name = "SIGTERM" if record["iteration"] == stop else None
            return record

        trainer._step = stopping
        trainer.run()
        trainer.metrics.close()
    assert rows_without_timing(tmp_path / "stopped") == rows
    assert json.loads((tmp_path / "stopped" / "best_checkpoint.json").read_text()) == named
    assert sorted(path.name for path in (tmp_path / "stopped").glob("iter_*")) == left
    # A run in another folder has no best checkpoint yet.
    load = f"--load {tmp_path}/stopped/{named['checkpoint']}"
    trainer, _ = make_trainer(f"{flags} --train-iters {best + 1} --save {tmp_path}/other {load}", MODEL)
    assert trainer.progress.iteration == best
    assert trainer.progress.best is None
    trainer.metrics.close()


def test_better_means_more_or_less() -> None:
    def judge(flags: str, best: BestCheckpoint | None, **values: float) -> BestCheckpoint | None:
        line = f"{MODEL} --task arithmetic --save x --eval-interval 1 --keep-best-checkpoint {flags}"
        return better_checkpoint(parse_arguments(line.split()).checkpoint, best, {"iteration": 3, **values})

    old = BestCheckpoint(2, "eval_reward", 0.5)
    assert judge("eval_reward", old, eval_reward=0.6) == BestCheckpoint(3, "eval_reward", 0.6)
    assert judge("eval_reward", old, eval_reward=0.5) == old
    assert judge("eval_reward", old, eval_reward=float("nan")) == old
    assert judge("eval_reward --best-checkpoint-mode min", old, eval_reward=0.4).iteration == 3
    assert judge("eval_loss", old, eval_loss=9.0) == BestCheckpoint(3, "eval_loss", 9.0)
    assert judge("eval_loss", BestCheckpoint(1, "eval_loss", 1.0), eval_loss=2.0).iteration == 1
    with pytest.raises(InputError, match="--keep-best-checkpoint eval_x: the evaluation gives eval_reward"):
        judge("eval_x", None, eval_reward=1.0)
