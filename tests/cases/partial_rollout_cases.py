"""Runs with ``--rollout-max-staleness``: what they train, with servers that are killed and restarted."""

import io
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_dta.common.console import Console
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.servers.http_client import HttpSettings
from megatron_dta.sampling.sources.rank0_source import unpack_rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.loop import Trainer
from megatron_dta.wiring.setup import build_trainer
from rollout_runs import Runs
from rollout_server_base import RolloutServer
from rollout_server_forms import log_softmax

Batches = list[tuple[int, list[Rollout]]]
# Servers that return or are new are found at once.
QUICK = partial(HttpSettings, revisit_s=0.1, backoff_s=0.02, backoff_limit_s=0.2)


def record(trainer: Trainer) -> Batches:
    """For each rollout batch the steps done when it was taken and its rollouts, filled as the trainer runs."""
    batches: Batches = []
    collect = trainer.source.next_batch

    def remember(number):
        rollouts = collect(number)
        batches.append((trainer.progress.iteration, rollouts))
        return rollouts

    trainer.source.next_batch = remember
    return batches


def tables_of(servers: Sequence[RolloutServer], trainer: Trainer) -> dict[int, np.ndarray]:
    """The table from which servers sample at each version of a run; all servers must agree."""
    run, tables = trainer.source._engine._weights.run, {}
    for server in servers:
        for label, table in server.tables.items():
            if label.startswith(run):
                assert np.array_equal(tables.setdefault(int(label.rsplit("-", 1)[1]), table), table)
    return tables


def check_batches(batches: Batches, tables: dict[int, np.ndarray], bound: int) -> None:
    """``check_versions`` for servers that sample from tables."""

    def own(version: int, rollout: Rollout) -> np.ndarray:
        ids = np.array(rollout.token_ids)
        rows = np.stack([log_softmax(tables[version][token]) for token in ids[:-1]])
        return np.concatenate([[np.nan], rows[np.arange(len(rows)), ids[1:]]])

    check_versions(batches, own, bound, 1e-5)


def check_versions(
    batches: Batches, score: Callable[[int, Rollout], np.ndarray], bound: int, most_error: float
) -> None:
    """Every token has the logprob of its version, versions rise along a rollout and are within the bound.

    Args:
        score: the logprobs of a rollout's tokens by a version, of which those of sampled tokens are compared.
    """
    for step, rollouts in batches:
        for rollout in rollouts:
            sampled = np.flatnonzero(rollout.loss_mask)
            versions = np.full(len(sampled), rollout.policy_version)
            if rollout.token_versions is not None:
                versions = rollout.token_versions[sampled]
                assert (rollout.token_versions[~rollout.loss_mask] == -1).all()
            assert (np.diff(versions) >= 0).all()
            assert rollout.policy_version == versions[0]
            assert 0 <= step - versions[-1] <= step - versions[0] <= bound
            for version in np.unique(versions):
                chosen = sampled[versions == version]
                assert np.abs(score(version, rollout)[chosen] - rollout.logprobs[chosen]).max() < most_error


def groups_in(batches: Batches) -> Counter[int]:
    """Number of rollouts of each group in the batches."""
    return Counter(int(rollout.group_id.split(":")[0]) for _, rollouts in batches for rollout in rollouts)


class Fleet:
    """Three servers of a run that are killed and restarted.

    Attributes:
        events: counts of what happened, by name.
        servers: all that ever were.
    """

    def __init__(self, runs: Runs, kind: str, rng: np.random.Generator) -> None:
        self._runs, self.kind, self._rng = runs, kind, rng
        self.events: Counter[str] = Counter()
        self.servers: list[RolloutServer] = []
        self._dead: list[RolloutServer] = []
        self._alive = [self._start() for _ in range(3)]

    @property
    def flags(self) -> str:
        """The flags that name the servers."""
        return " ".join(f"--rollout-server-url {url}" for url in dict.fromkeys(server.url for server in self.servers))

    def act(self, number: int) -> None:
        """Kill a server, or restart the one that has been dead for longest; one of them stays."""
        if number % 2 == 0 and len(self._alive) > 1:
            server = self._alive.pop(self._rng.integers(len(self._alive)))
            server.stop()
            self._dead.append(server)
            self.events["kill"] += 1
        elif number % 2 and self._dead:
            self._alive.append(self._start(int(self._dead.pop(0).url.rsplit(":", 1)[1])))
            self.events["restart"] += 1

    def _start(self, port: int = 0) -> RolloutServer:
        self._runs.servers.clear()
        (server,) = self._runs.add_servers(self.kind, 1, port=port)
        server.token_delay_s = 0.03
        self.servers.append(server)
        return server


def train_with_faults(runs: Runs, fleet: Fleet, steps: int, killed_after: int, flags: str = "") -> dict[str, int]:
    """Train while servers come and go, kill the run in the step after a checkpoint, continue it, and check that every
    group was trained once, by weights within the bound. The fleet acts after every second step.

    Returns:
        counts of trained groups, of rollouts with several versions, and of groups that the checkpoint kept.
    """
    runs.servers.clear()
    more = (
        f"--train-iters {steps} --save {runs.folder / 'run'} --save-interval {killed_after} --lr 1e-3 "
        f"--rollout-max-staleness 2 {fleet.flags} {flags}"
    )
    command = f"{runs.command(more, fleet.kind)} --rollout-attempts 20"
    saved: list[dict[str, Any]] = []

    def trainer(killed_at: int | None) -> Trainer:
        built = build_trainer(parse_arguments(command.split()), Console(file=io.StringIO()))
        report, state_dict = built._report, built.source.state_dict

        def act(record):
            report(record)
            if record["iteration"] % 2 == 0:
                fleet.act(record["iteration"] // 2 - 1)
            if record["iteration"] == killed_at:
                raise KeyboardInterrupt

        built._report, built.source.state_dict = act, lambda: saved.append(state_dict()) or saved[-1]
        return built

    first = trainer(killed_after + 1)
    lost = record(first)
    with suppress(KeyboardInterrupt):
        first.run()
    first.metrics.close()
    kept, second = saved[0]["stream"], trainer(None)
    assert second.progress.iteration == killed_after
    restored = second.source.state_dict()["stream"]
    assert_equal(restored, kept)
    rest = record(second)
    second.run()
    second.metrics.close()
    trained = lost[:killed_after]
    check_batches(trained, tables_of(fleet.servers, first), 2)
    tables = tables_of(fleet.servers, first) | tables_of(fleet.servers, second)
    known = {group["group"]: [unpack_rollout(rollout) for rollout in group["rollouts"]] for group in kept["finished"]}
    for step, rollouts in rest:
        for rollout in rollouts:
            group = int(rollout.group_id.split(":")[0])
            # A group that the checkpoint kept is trained as it was, bit for bit.
            same = [kept for kept in known.get(group, [rollout]) if np.array_equal(kept.token_ids, rollout.token_ids)]
            assert any(np.array_equal(kept.logprobs, rollout.logprobs) for kept in same)
            assert any(np.array_equal(kept.token_versions, rollout.token_versions) for kept in same)
        check_batches([(step, [r for r in rollouts if int(r.group_id.split(":")[0]) not in known])], tables, 2)
    check_begun(kept["begun"], [rollout for _, rollouts in rest for rollout in rollouts])
    groups = groups_in(trained) + groups_in(rest)
    assert set(groups.values()) == {4}
    assert len(groups) == 3 * steps
    end = saved[-1]["stream"]
    left = {group["group"] for group in end["finished"]} | set(end["unfinished"])
    assert not left & set(groups)
    assert left | set(groups) == set(range(end["next_group"]))
    every = [rollout for _, rollouts in trained + rest for rollout in rollouts]
    mixed = sum(len(np.unique(rollout.token_versions[rollout.loss_mask])) > 1 for rollout in every)
    begun = sum(len(sample["token_ids"]) for group in kept["begun"] for sample in group["samples"])
    return {"groups": len(groups), "mixed rollouts": mixed, "kept groups": len(known), "kept tokens of others": begun}


def check_begun(begun: list[dict[str, Any]], trained: list[Rollout]) -> None:
    """What a checkpoint kept of unfinished groups is in what was trained, bit for bit."""
    for group in begun:
        of_group = [rollout for rollout in trained if int(rollout.group_id.split(":")[0]) == group["group"]]
        for sample in group["samples"]:
            count, is_trained = len(sample["token_ids"]), False
            for rollout in of_group:
                sampled = np.flatnonzero(rollout.loss_mask)
                is_whole = "finish" not in sample or len(sampled) == count
                same = [
                    np.array_equal(values[sampled[:count]], sample[name].numpy())
                    for name, values in (
                        ("token_ids", np.array(rollout.token_ids)),
                        ("logprobs", rollout.logprobs),
                        ("versions", rollout.token_versions),
                    )
                ]
                is_trained |= all(same) and is_whole
            # A group may be left over at the end.
            assert is_trained or not of_group


def assert_equal(left: Any, right: Any) -> None:
    """Equal in every bit: dictionaries, lists, tensors and plain values."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
    if isinstance(left, dict | list):
        pairs = [(left[key], right[key]) for key in left] if isinstance(left, dict) else zip(left, right, strict=True)
        for first, other in pairs:
            assert_equal(first, other)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right
