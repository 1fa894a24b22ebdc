"""Training on rollouts of servers: weights pushed and loaded back, staleness, resuming, servers and replays ending."""

import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import assert_equal_tensors, seed_all
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.wiring.setup import build_trainer
from mesh_worker import run_on_ranks
from rollout_runs import Runs, metrics_of, weights_of
from rollout_server_forms import log_softmax


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(stack, tmp_path, seed_all(len(request.node.name)))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_three_steps_with_the_weights_pushed_before_each(runs: Runs, kind: str) -> None:
    first, second = runs.add_servers(kind, 2)
    trainer, _ = runs.trainer(f"--train-iters 3 --save {runs.folder / 'run'}")
    at_step = [weights_of(trainer)]
    seen: list[list[Rollout]] = []
    step, collect = trainer.optimizer.step, trainer.source.next_batch

    def record_step(loss):
        outcome = step(loss)
        at_step.append(weights_of(trainer))
        return outcome

    def record_rollouts(number):
        seen.append(collect(number))
        return seen[-1]

    trainer.optimizer.step, trainer.source.next_batch = record_step, record_rollouts
    trainer.run()
    trainer.metrics.close()
    assert not torch.equal(at_step[0]["lm_head.weight"], at_step[3]["lm_head.weight"])
    for server in (first, second):
        assert len(server.loaded) == 3
        for pushed, expected in zip(server.loaded, at_step, strict=False):
            assert_equal_tensors(pushed, expected)
        assert not server.violations
    assert len(first.bodies) + len(second.bodies) == 3 * 12
    assert len(seen) == 3
    for version, rollouts in enumerate(seen):
        assert {rollout.policy_version for rollout in rollouts} == {version}
        assert len({rollout.group_id for rollout in rollouts}) == 3
    # Nothing is left behind, and the folder itself is not a checkpoint to resume from.
    assert list((runs.folder / "run" / "rollout-weights").iterdir()) == []
    rows = metrics_of(runs.folder / "run")
    assert [row["rollout_staleness"] for row in rows] == [0, 0, 0]
    assert [row["timing"]["rollout_servers"] for row in rows] == [2, 2, 2]


def test_a_resumed_run_trains_on_the_same_rollouts(runs: Runs) -> None:
    runs.add_servers("vllm", 1)
    uninterrupted, _ = runs.run(f"--train-iters 3 --save {runs.folder / 'whole'} --save-interval 2")
    broken, _ = runs.trainer(f"--train-iters 3 --save {runs.folder / 'broken'} --save-interval 2")
    report = broken._report

    def stop(record):
        report(record)
        if record["iteration"] == 3:
            raise KeyboardInterrupt

    # Stopped after the checkpoint of step 2, within step 3.
    broken._report = stop
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    broken.metrics.close()
    continued, output = runs.run(f"--train-iters 3 --save {runs.folder / 'broken'} --save-interval 2")
    assert "after step 2" in output
    assert_equal_tensors(weights_of(uninterrupted), weights_of(continued))
    expected, resumed = (metrics_of(runs.folder / name) for name in ("whole", "broken"))
    for row in expected + resumed:
        row.pop("timing")
    assert resumed == expected


@pytest.mark.parametrize("bound", [0, 1])
def test_when_all_servers_die_what_was_trained_is_kept(runs: Runs, bound: int) -> None:
    save = runs.folder / "run"
    ahead = f"--rollout-max-staleness {bound}" if bound else ""
    (server,) = runs.add_servers("sglang", 1)
    server.faults[server.generate_path] = [None] * 30 + ["die"]  # in the third rollout batch
    with pytest.raises(InputError, match=r"^after step [12]: .*no rollout server .*is saved") as caught:
        runs.run(f"--train-iters 4 {ahead} --save {save}")
    assert "\n" not in str(caught.value)
    saved = (save / "latest_checkpointed_iteration.txt").read_text()
    assert saved in ("1", "2") if bound else saved == "2"
    runs.servers.clear()
    runs.add_servers("sglang", 1)
    continued, output = runs.run(f"--train-iters 4 {ahead} --save {save}")
    assert f"after step {saved}" in output
    assert continued.progress.iteration == 4
    assert [row["iteration"] for row in metrics_of(save)] == [1, 2, 3, 4]


def test_sigterm_does_not_wait_for_what_is_sampled_ahead(runs: Runs) -> None:
    (server,) = runs.add_servers("sglang", 1)
    command = f"--train-iters 3 --rollout-max-staleness 1 --save {runs.folder / 'run'}"
    trainer, _ = runs.trainer(command)
    report = trainer._report
    ended: list[float] = []

    def stop(record):
        report(record)
        if record["iteration"] == 1:
            trainer.signals.name = "SIGTERM"
            ended.append(time.monotonic())

    trainer._report = stop
    collect = trainer.source.next_batch

    def slow_down(number):
        rollouts = collect(number)
        server.delay_s = 60.0
        return rollouts

    trainer.source.next_batch = slow_down
    # The rollout batch after the first one hangs from its first request on.
    server.faults[server.generate_path] = [None] * 12 + ["hang"] * 12
    trainer.run()
    trainer.metrics.close()
    assert time.monotonic() - ended[0] < 50
    server.delay_s = 0.0
    server.faults.clear()
    continued, output = runs.run(command)
    assert "after step 1" in output
    assert continued.progress.iteration == 3


TREES = "--rollout-method treepo --treepo-segment-length 2 --treepo-initial-branches 2"


def test_trees_grow_on_servers(runs: Runs) -> None:
    """A tree's branches follow its prompt to one server, and every leaf is there with its logprobs."""
    servers = runs.add_servers("vllm", 3)
    trainer, _ = runs.trainer(f"--train-iters 2 --rollout-weights-dir {runs.folder / 'w'} {TREES}")
    seen: list[list[Rollout]] = []
    collect = trainer.source.next_batch
    trainer.source.next_batch = lambda number: seen.append(collect(number)) or seen[-1]
    trainer.run()
    trainer.metrics.close()
    assert [len(rollouts) for rollouts in seen] == [12, 12]
    contexts = [[tuple(body["prompt"]) for body in server.bodies] for server in servers]
    assert sum(len(prompts) > 0 for prompts in contexts) == 3
    for rollout in seen[1]:
        assert rollout.policy_version == 1
        prompt = tuple(rollout.token_ids[: rollout.segment_ends[0]].tolist())
        table = servers[0].table
        for position in np.flatnonzero(rollout.loss_mask):
            row = log_softmax(table[rollout.token_ids[position - 1]])
            assert abs(row[rollout.token_ids[position]] - rollout.logprobs[position]) < 1e-5
        assert any(prompt in prompts for prompts in contexts)
    assert not any(server.violations for server in servers)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="ipc needs a GPU; on CPUs give folder"):
            runs.trainer("--train-iters 1 --rollout-weight-transfer ipc")


def train_on_rank(rank: int, commands: list[str]) -> list[dict[str, Any]]:
    """Run commands one after another: weights and metrics, or the error."""
    from megatron_dta.core.model.parallel.mesh import destroy_parallel

    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    results: list[dict[str, Any]] = []
    for command in commands:
        destroy_parallel()
        trainer = build_trainer(parse_arguments(command.split()), Console(file=io.StringIO()))
        try:
            trainer.run()
            results.append({"weights": weights_of(trainer), "threads": threading.active_count()})
        except InputError as error:
            results.append({"error": str(error)})
        finally:
            trainer.metrics.close()
    return results


def test_all_ranks_of_a_mesh_train_on_what_the_first_one_gets(runs: Runs) -> None:
    (server,) = runs.add_servers("sglang", 1, delay_s=0.01)
    base = runs.command(
        f"--train-iters 2 --eval-interval 2 --lr 1e-3 --eval-prompt-data {runs.folder / 'prompts.jsonl'}"
    )
    single, _ = runs.run(f"--train-iters 2 --lr 1e-3 --rollout-weights-dir {runs.folder / 'w'}")
    group = "--rollout-weight-transfer gloo"
    meshes = {"dp": "", "pp": f"--pipeline-model-parallel-size 2 {group}"}
    calls = len(server.bodies)
    commands = [f"{base} {flags} --save {runs.folder / name}" for name, flags in meshes.items()]
    ranks = run_on_ranks(train_on_rank, commands, 2, runs.folder / "ranks")
    assert len(server.bodies) - calls == 2 * (2 * 12 + 2 * 7)
    for index in range(len(meshes)):
        first, second = (rank[index]["weights"] for rank in ranks)
        assert_equal_tensors(first, second)
        for name, values in weights_of(single).items():
            torch.testing.assert_close(first[name], values, rtol=2e-3, atol=2e-4)
        # It has been evaluated with the weights of its end, byte for byte.
        assert any(all(torch.equal(loaded[name], first[name]) for name in first) for loaded in server.loaded)
    # What the first rank meets all ranks tell.
    server.faults[server.generate_path] = [None] * (7 + 12 + 5) + ["die"]
    ranks = run_on_ranks(train_on_rank, [f"{base} --save {runs.folder / 'dies'}"], 2, runs.folder / "ranks_dies")
    assert ranks[0][0]["error"] == ranks[1][0]["error"]
    assert "after step 1: request" in ranks[0][0]["error"]
    assert (runs.folder / "dies" / "latest_checkpointed_iteration.txt").read_text() == "1"
