"""Training on rollouts of real vLLM servers that are killed, started again, added and removed meanwhile, on CPUs.

``DTA_VLLM_STEPS`` makes the runs longer.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vllm_process
from conftest import seed_all
from megatron_dta.common.console import Console
from megatron_dta.core.rollouts import Rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.loop import Trainer
from megatron_dta.wiring import engines as build
from megatron_dta.wiring.setup import build_trainer
from partial_rollout_cases import QUICK, check_versions, groups_in, record
from rollout_runs import Runs, weights_of
from vllm_cases import LOGPROB_ERROR, check_parameters, logprobs_of, random_model, write_model
from vllm_process import VllmProcess
from weight_receiver import IdGroup

pytestmark = pytest.mark.skipif(vllm_process.PYTHON is None, reason=vllm_process.WHY_SKIPPED)
STEPS = int(os.environ.get("DTA_VLLM_STEPS", "24"))


class Fleet:
    """Three servers, of which the first is listed at the beginning.

    Attributes:
        servers: all of them, listed or not.
        file: the list.
    """

    def __init__(self, stack: ExitStack, folder: Path, model: Path, backend: str) -> None:
        self.servers = [VllmProcess(folder, model, backend, plain=True) for _ in range(3)]
        for server in self.servers:
            stack.callback(server.kill)
            server.start()
        self.file = folder / "servers"
        self.list(0)
        for server in self.servers:
            server.wait()

    def list(self, *places: int) -> None:
        temporary = self.file.with_suffix(".new")
        temporary.write_text("".join(f"{self.servers[place].url}\n" for place in places))
        temporary.replace(self.file)

    def act(self, step: int, alive: Callable[[], float]) -> None:
        """Add two, kill one, start it again, remove two.

        Args:
            alive: the number of servers that get requests.
        """
        if step == 2:
            self.list(0, 1)
        elif step == 4:
            self.list(0, 1, 2)
            _until(lambda: alive() == 3)
        elif step == 7:
            self.servers[0].kill()
            self.servers[0].start()
        elif step == 11:
            self.servers[0].wait()
            _until(lambda: alive() == 3)
        elif step == 13:
            self.list(0, 2)
        elif step == 16:
            self.list(0)


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as stack:
        found = Runs(stack, tmp_path, seed_all(len(request.node.name)))
        write_model(tmp_path / "qwen", 0)
        yield found


@pytest.mark.parametrize("backend", ["gloo", "sparse_gloo"])
def test_no_group_is_lost_or_trained_twice(
    runs: Runs, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Since 0.33 replies tell the version of each token.
    ways = (2, "--partial-rollout") if vllm_process.version() >= (0, 33) else (1, "")
    bound, partial = ways
    monkeypatch.setattr(build, "HttpSettings", QUICK)
    monkeypatch.setattr(build, "group_opener", lambda backend, by_unique_id: IdGroup)
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path, tmp_path / "qwen", backend)
        delta = "--rollout-weight-delta --rollout-weight-check-interval 1" if backend == "sparse_gloo" else ""
        command = runs.command(
            f"--train-iters {STEPS} --save {tmp_path / 'run'} --save-interval {STEPS} --lr 1e-3 "
            f"--rollout-max-staleness {bound} {partial} --rollout-server-file {fleet.file} "
            f"--rollout-weight-transfer nccl {delta}",
            "vllm",
        ).replace(str(tmp_path / "hf"), str(tmp_path / "qwen"))
        trainer, output = _trainer(
            f"{command} --rollout-max-response-len 48 --rollout-attempts 20 --rollout-timeout-seconds 120"
        )
        weights, batches, kept = {0: weights_of(trainer)}, record(trainer), []
        report, state_dict = trainer._report, trainer.source.state_dict

        def act(row: dict[str, Any]) -> None:
            report(row)
            weights[row["iteration"]] = weights_of(trainer)
            fleet.act(row["iteration"], lambda: trainer.source._engine.statistics()["servers"])

        trainer._report = act
        trainer.source.state_dict = lambda wait=True: kept.append(state_dict(wait)) or kept[-1]
        trainer.run()
        trainer.metrics.close()
        version = trainer.source._engine._weights.version
        assert STEPS - 1 - bound <= version <= STEPS
        check_parameters(fleet.servers[0].checksums(), weights[version], 1, plain=True)
    check_versions(batches, _logprobs_by(weights), bound, LOGPROB_ERROR)
    groups = groups_in(batches)
    assert set(groups.values()) == {4}
    assert len(groups) == 3 * STEPS
    _check_left(kept[-1], set(groups))
    lines = output.getvalue()
    assert f"{fleet.servers[0].url} is left out" in lines
    assert all(f"{server.url} is new" in lines for server in fleet.servers[1:])
    assert all(f"{server.url} is no longer listed" in lines for server in fleet.servers[1:])
    mixed = sum(len(np.unique(r.token_versions[r.loss_mask])) > 1 for _, b in batches for r in b) if partial else 0
    assert bool(mixed) == bool(partial)


def _trainer(command: str) -> tuple[Trainer, io.StringIO]:
    """A trainer that sends over gloo where the flags say NCCL."""
    config, output = parse_arguments(command.split()), io.StringIO()
    config.sampling.rollout_weight_transfer = "gloo"
    return build_trainer(config, Console(file=output, width=400)), output


def _logprobs_by(weights: dict[int, dict[str, torch.Tensor]]) -> Callable[[int, Rollout], np.ndarray]:
    model, loaded = random_model(0), [-1]

    def own(version: int, rollout: Rollout) -> np.ndarray:
        if loaded[0] != version:
            model.load_state_dict(weights[version])
            loaded[0] = version
        return np.concatenate([[np.nan], logprobs_of(model, rollout.token_ids).numpy()])

    return own


def _check_left(state: dict[str, Any], trained: set[int]) -> None:
    """What was begun and not trained is in the checkpoint."""
    if "stream" not in state:
        assert trained == set(range(len(trained)))
        return
    stream = state["stream"]
    left = {each["group"] for each in stream["finished"]} | set(stream["unfinished"])
    assert not left & trained
    assert left | trained == set(range(stream["next_group"]))
