"""The best checkpoint, also across a restart."""

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.checkpoint.best import BestCheckpoint, better_checkpoint
from resume_cases import rows_without_timing
from trainer_cases import make_trainer, run, run_until

VOCABULARY = 13
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --swiglu --disable-bias-linear "
    f"--max-position-embeddings 32 --vocab-size {VOCABULARY} --lr 1e-2"
)


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
        "--async-save"
    )


def test_the_best_checkpoint_stays_and_a_new_start_knows_it(tmp_path: Path) -> None:
    flags = stored(tmp_path)
    run(f"{flags} --train-iters 12 --save {tmp_path}/straight", MODEL)
    rows = rows_without_timing(tmp_path / "straight")
    judged = {row["iteration"]: row["eval_loss"] for row in rows if "eval_loss" in row and row["iteration"]}
    best = min(judged, key=judged.__getitem__)
    assert 0 < best < 12, "the held-out loss must rise again, or nothing is shown"
    named = json.loads((tmp_path / "straight" / "best_checkpoint.json").read_text())
    assert named == {"checkpoint": f"iter_{best:07d}", "iteration": best, "metric": "eval_loss", "value": judged[best]}
    left = sorted(path.name for path in (tmp_path / "straight").glob("iter_*"))
    assert left == [f"iter_{best:07d}", "iter_0000012"]
    for stop in (best - 1, best, best + 1, 12):
        run_until(stop, f"{flags} --train-iters 12 --save {tmp_path}/stopped", MODEL)
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
    assert judge("eval_loss", old, eval_loss=9.0) == BestCheckpoint(3, "eval_loss", 9.0)
    assert judge("eval_loss", BestCheckpoint(1, "eval_loss", 1.0), eval_loss=2.0).iteration == 1
    with pytest.raises(InputError, match="--keep-best-checkpoint eval_x: the evaluation gives eval_reward"):
        judge("eval_x", None, eval_reward=1.0)
