"""Runs that send their weights to servers through a process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import seed_all
from rollout_runs import Runs, assert_same, metrics_of, weights_of
from rollout_servers import RolloutServer


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(stack, tmp_path, seed_all(len(request.node.name)))


def restart(runs: Runs, server: RolloutServer) -> RolloutServer:
    server.stop()
    return runs._stack.enter_context(type(server)(server.table, port=int(server.url.rsplit(":", 1)[1])))


def test_every_server_has_the_trainers_bytes_also_one_that_was_restarted(runs: Runs) -> None:
    # Those of runs that other tests have left.
    threads = set(threading.enumerate())
    first, second = runs.add_servers("sglang", 2, processes=2)
    trainer, _ = runs.trainer(
        f"--train-iters 6 --rollout-weight-transfer gloo --save {runs.folder / 'run'} --rollout-max-staleness 1"
    )
    at_step = {0: weights_of(trainer)}
    seen: list[int] = []
    step, collect = trainer.optimizer.step, trainer.source.next_batch
    restarted: list[RolloutServer] = []

    def record_step(loss):
        outcome = step(loss)
        at_step[trainer.progress.iteration + 1] = weights_of(trainer)
        if trainer.progress.iteration == 2:
            restarted.append(restart(runs, second))
        return outcome

    def record_rollouts(number):
        rollouts = collect(number)
        seen.append(min(rollout.policy_version for rollout in rollouts))
        return rollouts

    trainer.optimizer.step, trainer.source.next_batch = record_step, record_rollouts
    trainer.run()
    trainer.metrics.close()
    assert len(seen) == 6
    assert all(number - 1 <= version <= number for number, version in enumerate(seen))
    for server in (first, second, *restarted):
        assert server.loaded
        assert not server.violations
        for pushed in server.loaded:
            (version,) = [v for v, weights in at_step.items() if _same(pushed, weights)]
            assert_same(pushed, at_step[version])
    assert _same(first.loaded[-1], restarted[0].loaded[-1])
    # Once for the first members, and once after the restart.
    assert first.receiver.groups == 2
    rows = metrics_of(runs.folder / "run")
    assert rows[-1]["timing"]["rollout_weight_update_seconds"] > 0
    assert rows[-1]["timing"]["rollout_servers"] == 2
    assert not any(thread.name.startswith("rollout") for thread in set(threading.enumerate()) - threads)


def _same(left, right) -> bool:
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)
