"""Training on rollouts of real vLLM servers that are killed and started again meanwhile, on CPUs.

``DTA_VLLM_STEPS`` makes the runs longer.
"""

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
from megatron_dta.core.rollouts.record import Rollout
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
    """Three servers, of which some are killed and started again."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        self.servers = [VllmProcess(folder, model, "gloo", plain=True) for _ in range(3)]
        for server in self.servers:
            stack.callback(server.kill)
            server.start()
        for server in self.servers:
            server.wait()

    def act(self, step: int, alive: Callable[[], float]) -> None:
        """Kill servers and start them again.

        Args:
            alive: the number of servers that get requests.
        """
        if step == 4:
            self.servers[0].kill()
            self.servers[0].start()
        elif step == 8:
            self.servers[0].wait()
            _until(lambda: alive() == 3)
        elif step == 10:
            self.servers[1].kill()
        elif step == 13:
            self.servers[1].start()


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as stack:
        started = Runs(stack, tmp_path, seed_all(len(request.node.name)))
        write_model(tmp_path / "qwen", 0)
        yield started


def test_no_group_is_lost_or_trained_twice(runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Since 0.33 replies tell the version of each token.
    bound = 2 if vllm_process.version() >= (0, 33) else 0
    monkeypatch.setattr(build, "HttpSettings", QUICK)
    monkeypatch.setattr(build, "group_opener", lambda backend, by_unique_id: IdGroup)
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path, tmp_path / "qwen")
        urls = " ".join(f"--rollout-server-url {server.url}" for server in fleet.servers)
        command = runs.command(
            f"--train-iters {STEPS} --save {tmp_path / 'run'} --save-interval {STEPS} --lr 1e-3 "
            f"{f'--rollout-max-staleness {bound}' if bound else ''} {urls} --rollout-weight-transfer nccl",
            "vllm",
        ).replace(str(tmp_path / "hf"), str(tmp_path / "qwen"))
        trainer, output = _trainer(
            f"{command} --rollout-max-response-len 48 --rollout-attempts 20 --rollout-timeout 120"
        )
        weights, batches, kept = {0: weights_of(trainer)}, record(trainer), []
        report, state_dict = trainer._report, trainer.source.state_dict

        def act(row: dict[str, Any]) -> None:
            report(row)
            weights[row["iteration"]] = weights_of(trainer)
            fleet.act(row["iteration"], lambda: trainer.source._engine.statistics()["servers"])

        trainer._report = act
        trainer.source.state_dict = lambda: kept.append(state_dict()) or kept[-1]
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
    assert f"{fleet.servers[0].url} has the newest weights and gets requests" in lines
    mixed = sum(len(np.unique(r.token_versions[r.loss_mask])) > 1 for _, b in batches for r in b) if bound else 0
    assert bool(mixed) == bool(bound)


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
    left = {group["group"] for group in stream["finished"]} | set(stream["unfinished"])
    assert not left & trained
    assert left | trained == set(range(stream["next_group"]))
