"""Decoupled PPO on rollouts that servers sampled ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from rollout_runs import Runs


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(stack, tmp_path, seed_all(len(request.node.name)))


def test_stale_rollouts_train_by_decoupled_ppo(runs: Runs) -> None:
    """Ratios r are clipped around the trainer's logprobs from before the batch and weighted by what lies between these
    and the sampler's: L = -mean(w min(r A, clip(r) A)) with w = exp(old - sampler's), 0 outside of the bounds.
    """
    runs.add_servers("sglang", 2, delay_s=0.02)
    trainer, _ = runs.trainer(
        f"--train-iters 6 --save {runs.folder / 'run'} --rollout-max-staleness 3 "
        "--num-steps-per-rollout 3 --old-logprobs recompute --use-tis --tis-mode mask --tis-clip 20 "
        "--tis-clip-low 1e-6 --eps-clip 0.01 --lr 1e-3"
    )
    train, prepare = trainer._train_policy, trainer.preparation.prepare
    weights: list[float] = []

    def prepare_and_compare(rollouts):
        steps = prepare(rollouts)
        for step in steps:
            for sample, now in zip(step.samples, trainer.engine.compute_logprobs(step.planned), strict=True):
                np.testing.assert_array_equal(sample.old_logprobs[sample.loss_mask], now[sample.loss_mask])
        return steps

    def train_and_compare(step, watch):
        present = trainer.engine.compute_logprobs(trainer._planned(step, watch))

        def trained_tokens(arrays):
            pairs = zip(arrays, step.samples, strict=True)
            return np.concatenate([np.float64(array[sample.loss_mask]) for array, sample in pairs])

        old = trained_tokens([sample.old_logprobs for sample in step.samples])
        weight = np.exp(old - trained_tokens([sample.rollout_logprobs for sample in step.samples]))
        weight[(weight > 20) | (weight < 1e-6)] = 0
        advantages = trained_tokens([sample.advantages for sample in step.samples])
        ratio = np.exp(trained_tokens(present) - old)
        surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.99, 1.01) * advantages)
        record = train(step, watch)
        assert record["loss"] == pytest.approx(-np.mean(weight * surrogate), rel=1e-4, abs=1e-9)
        assert record["tis_weight"] == pytest.approx(np.mean(weight), rel=1e-4)
        weights.append(float(np.mean(weight)))
        return record

    trainer._train_policy, trainer.preparation.prepare = train_and_compare, prepare_and_compare
    trainer.run()
    trainer.metrics.close()
    rows = [json.loads(line) for line in (runs.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert min(weights) > 0
    assert max(weights) > 0.01
    assert len(rows) == len(weights) == 6
    assert max(row["rollout_staleness"] for row in rows) > 1
