"""Rollouts that continue on newer weights during training, and decoupled PPO on those that were sampled ahead."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from megatron_dta.core.rollouts.jsonl import read_jsonl
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.monitor.metric_names import is_known
from megatron_dta.wiring import engines as build
from megatron_dta.wiring.dry_run import dry_run
from partial_rollout_cases import QUICK, Fleet, check_batches, record, tables_of, train_with_faults
from rollout_runs import Runs


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(stack, tmp_path, seed_all(len(request.node.name)))


@pytest.mark.parametrize(("kind", "way"), [("vllm", "folder"), ("sglang", "gloo")])
def test_tokens_keep_the_version_that_sampled_them(runs: Runs, kind: str, way: str) -> None:
    servers = runs.add_servers(kind, 2)
    # Groups of the quick one are trained while the slow one is in the middle of its responses.
    servers[0].token_delay_s, servers[1].token_delay_s = 0.01, 0.1
    trainer, _ = runs.trainer(
        f"--train-iters 6 --save {runs.folder / 'run'} --rollout-max-staleness 2 --lr 1e-3 "
        f"--rollout-weight-transfer {way} --save-rollouts-interval 1"
    )
    batches = record(trainer)
    trainer.run()
    trainer.metrics.close()
    check_batches(batches, tables_of(servers, trainer), 2)
    assert [len(rollouts) for _, rollouts in batches] == [12] * 6
    mixed = [r for _, rollouts in batches for r in rollouts if len(set(r.token_versions[r.loss_mask])) > 1]
    assert mixed
    rows = [json.loads(line) for line in (runs.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["mixed_rollouts"] for row in rows) > 0
    assert all(row["stale_rollouts"] == 0 for row in rows)
    assert "rollout_queued_requests" in rows[0]["timing"]
    names = {name for row in rows for name in (*row, *(f"timing/{timing}" for timing in row["timing"]))} - {"timing"}
    assert sorted(name for name in names if not is_known(name)) == []
    for row, (step, rollouts) in zip(rows, batches, strict=True):
        versions = np.concatenate([r.token_versions[r.loss_mask] for r in rollouts])
        assert row["token_staleness"] == pytest.approx(step - versions.mean())
        assert row["rollout_staleness"] == step - versions.min()
    saved = [rollout for _, rollout in read_jsonl(runs.folder / "run" / "rollouts" / "step_0000006.jsonl")]
    # Short responses may be equal and of different versions.
    kept = {(tuple(rollout.token_ids), tuple(rollout.token_versions)) for rollout in batches[5][1]}
    assert saved
    assert all((tuple(rollout.token_ids), tuple(rollout.token_versions)) in kept for rollout in saved)
    assert not any(server.violations for server in servers)


def test_the_preset_of_areal_runs(runs: Runs) -> None:
    runs.add_servers("vllm", 1)
    preset = f"@{REPOSITORY / 'examples' / 'areal_async.args'}"
    shape = "--rollout-batch-size 3 --rollout-max-response-len 8"
    command = (
        f"{runs.command('').replace('--lr 1e-2', '')} {preset} {shape} --train-iters 4 --save {runs.folder / 'run'}"
    )
    lines: list[str] = []
    dry_run(parse_arguments(f"{command} --dry-run".split()), lines.append)
    assert lines
    # Evaluations come between requests of the stream, with the weights of their step.
    evaluated = f"--eval-interval 2 --eval-prompt-data {runs.folder / 'prompts.jsonl'}"
    trainer, _ = runs.trainer(f"{preset} {shape} --train-iters 4 --save {runs.folder / 'run'} {evaluated}")
    batches = record(trainer)
    trainer.run()
    trainer.metrics.close()
    assert [len(rollouts) for _, rollouts in batches] == [12] * 4
    assert trainer.config.optimization.lr == 1.7e-5
    rows = [json.loads(line) for line in (runs.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "eval_reward" in row] == [0, 2, 4]


def test_no_group_is_lost_or_trained_twice_while_servers_come_and_go(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers die and return, and the run is killed once."""
    monkeypatch.setattr(build, "HttpSettings", QUICK)
    fleet = Fleet(runs, "vllm", np.random.default_rng(3))
    counts = train_with_faults(runs, fleet, steps=9, killed_after=5)
    assert counts["groups"] == 27
    assert {"kill", "restart"} <= set(fleet.events)


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
