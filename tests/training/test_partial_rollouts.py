"""Rollouts that continue on newer weights during training: a version per token, nothing lost or trained twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from megatron_dta.core.common.errors import InputError
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
        f"--train-iters 8 --save {runs.folder / 'run'} --rollout-max-staleness 2 --lr 1e-3 "
        f"--rollout-weight-transfer {way} --save-rollouts-interval 1"
    )
    batches = record(trainer)
    trainer.run()
    trainer.metrics.close()
    check_batches(batches, tables_of(servers, trainer), 2)
    assert [len(rollouts) for _, rollouts in batches] == [12] * 8
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
    saved = [rollout for _, rollout in read_jsonl(runs.folder / "run" / "rollouts" / "step_0000008.jsonl")]
    # Short responses may be equal and of different versions.
    kept = {(tuple(rollout.token_ids), tuple(rollout.token_versions)) for rollout in batches[7][1]}
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


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--rollout-max-staleness 1 --dynamic-sampling", "conflicts with --dynamic-sampling"),
        ("--rollout-max-staleness 1 --rollout-method treepo", "conflicts with --rollout-method treepo"),
    ],
)
def test_what_has_no_single_groups_is_refused(runs: Runs, flags: str, match: str) -> None:
    runs.add_servers("vllm", 1)
    with pytest.raises(InputError, match=match):
        runs.trainer(f"--train-iters 1 --save {runs.folder / 'run'} {flags}")


def test_no_group_is_lost_or_trained_twice_while_servers_come_and_go(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers die and return, and the run is killed once."""
    monkeypatch.setattr(build, "HttpSettings", QUICK)
    fleet = Fleet(runs, "vllm", np.random.default_rng(3))
    counts = train_with_faults(runs, fleet, steps=12, killed_after=7)
    assert counts["groups"] == 36
    assert {"kill", "restart"} <= set(fleet.events)
