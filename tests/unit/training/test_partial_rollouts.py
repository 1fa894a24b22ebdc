"""Rollouts that continue on newer weights while training goes on: versions by token, nothing lost or trained twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from megatron_dta.arguments import parse_arguments
from megatron_dta.common.errors import InputError
from megatron_dta.rollouts import Rollout
from megatron_dta.rollouts.jsonl import read_jsonl
from megatron_dta.training.dry_run import dry_run
from megatron_dta.training.loop import Trainer
from rollout_runs import Runs
from rollout_server_forms import log_softmax


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(stack, tmp_path, seed_all(len(request.node.name)))


def record(trainer: Trainer) -> list[tuple[int, list[Rollout]]]:
    """For each rollout batch the steps done when it was taken and its rollouts, filled as the trainer runs."""
    found: list[tuple[int, list[Rollout]]] = []
    collect = trainer.source.next_batch

    def remember(number):
        rollouts = collect(number)
        found.append((trainer.progress.iteration, rollouts))
        return rollouts

    trainer.source.next_batch = remember
    return found


def tables_of(runs: Runs, trainer: Trainer) -> dict[int, np.ndarray]:
    """The table that the servers sample from at each version, filled as they get weights; some versions are skipped."""
    tables: dict[int, np.ndarray] = {}
    engine, newest = trainer.source._engine, []
    update = engine.update_weights

    def update_weights(version, weights):
        newest.append(version)
        update(version, weights)

    engine.update_weights = update_weights
    for server in runs.servers:

        def use(weights, server=server, use=server.use):
            use(weights)
            tables[newest[-1]] = server.table

        server.use = use
    return tables


def check_batches(batches: list[tuple[int, list[Rollout]]], tables: dict[int, np.ndarray], bound: int) -> None:
    """Every token has the logprob of its version, versions rise along a rollout and are within the bound."""
    names = Counter(rollout.group_id for _, rollouts in batches for rollout in rollouts)
    assert set(names.values()) <= {4}
    for step, rollouts in batches:
        for rollout in rollouts:
            places = np.flatnonzero(rollout.loss_mask)
            versions = rollout.token_versions[places]
            assert (np.diff(versions) >= 0).all()
            assert rollout.policy_version == versions[0]
            assert 0 <= step - versions[-1] <= step - versions[0] <= bound
            assert (rollout.token_versions[~rollout.loss_mask] == -1).all()
            for place, version in zip(places, versions, strict=True):
                row = log_softmax(tables[version][rollout.token_ids[place - 1]])
                assert abs(row[rollout.token_ids[place]] - rollout.logprobs[place]) < 1e-5


@pytest.mark.parametrize(("kind", "way"), [("vllm", "folder"), ("sglang", "gloo")])
def test_tokens_keep_the_version_that_sampled_them(runs: Runs, kind: str, way: str) -> None:
    servers = runs.add_servers(kind, 2)
    for server in servers:
        server.token_delay_s = 0.05
    trainer, _ = runs.trainer(
        f"--train-iters 8 --save {runs.folder / 'run'} --rollout-max-staleness 2 --partial-rollout --lr 1e-3 "
        f"--rollout-weight-transfer {way} --save-rollouts-interval 1"
    )
    batches, tables = record(trainer), tables_of(runs, trainer)
    trainer.run()
    trainer.metrics.close()
    check_batches(batches, tables, 2)
    assert [len(rollouts) for _, rollouts in batches] == [12] * 8
    mixed = [r for _, rollouts in batches for r in rollouts if len(set(r.token_versions[r.loss_mask])) > 1]
    assert mixed
    rows = [json.loads(line) for line in (runs.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["mixed_rollouts"] for row in rows) > 0
    assert all(row["stale_rollouts"] == 0 for row in rows)
    for row, (step, rollouts) in zip(rows, batches, strict=True):
        versions = np.concatenate([r.token_versions[r.loss_mask] for r in rollouts])
        assert row["token_staleness"] == pytest.approx(step - versions.mean())
        assert row["rollout_staleness"] == step - versions.min()
    saved = [rollout for _, rollout in read_jsonl(runs.folder / "run" / "rollouts" / "step_0000008.jsonl")]
    kept = {tuple(rollout.token_ids): rollout.token_versions.tolist() for rollout in batches[7][1]}
    assert saved
    assert all(rollout.token_versions.tolist() == kept[tuple(rollout.token_ids)] for rollout in saved)
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
    trainer, _ = runs.trainer(f"{preset} {shape} --train-iters 4 --save {runs.folder / 'run'}")
    batches = record(trainer)
    trainer.run()
    trainer.metrics.close()
    assert [len(rollouts) for _, rollouts in batches] == [12] * 4
    assert trainer.config.optimization.lr == 1.7e-5


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--partial-rollout", "needs --rollout-max-staleness 1 or more"),
        ("--partial-rollout-stale drop", "has no effect without --partial-rollout"),
        ("--rollout-max-staleness 1 --partial-rollout --dynamic-sampling", "conflicts with --dynamic-sampling"),
        (
            "--rollout-max-staleness 1 --partial-rollout --rollout-method treepo",
            "conflicts with --rollout-method treepo",
        ),
    ],
)
def test_what_has_no_single_groups_is_refused(runs: Runs, flags: str, match: str) -> None:
    runs.add_servers("vllm", 1)
    with pytest.raises(InputError, match=match):
        runs.trainer(f"--train-iters 1 --save {runs.folder / 'run'} {flags}")
