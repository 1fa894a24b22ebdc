"""A pipeline stage that fails or is lost ends all of them, with the op, the segment and the stage named."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mesh_worker import MeshCase, run_cases, run_on_ranks
from pipeline_shared import pipeline_case


@pytest.fixture(scope="module")
def case() -> MeshCase:
    return pipeline_case()


def run_with(method: str, change: Callable[..., Any], rank: int, case: MeshCase) -> None:
    """Run the case with ``change(method, run, op, *arguments)`` in place of a method of ``StageRun``."""
    from megatron_dta.core.engine.stage_run import StageRun

    original = getattr(StageRun, method)
    with mock.patch.object(StageRun, method, lambda run, op, *arguments: change(original, run, op, *arguments)):
        run_cases(rank, {"": case})


def fail_in_the_model(rank: int, case: MeshCase) -> None:
    """The last stage's model fails in a forward of training."""

    def failing(run_model: Callable, run: Any, op: Any, *arguments: Any) -> Any:
        if rank == 1 and run.training and op.segment == 3:
            raise ArithmeticError("a broken kernel")
        return run_model(run, op, *arguments)

    run_with("_run_model", failing, rank, case)


def send_a_wrong_shape(rank: int, case: MeshCase) -> None:
    """The first stage's model returns a token too few."""

    def shorter(run_model: Callable, run: Any, op: Any, *arguments: Any) -> list[torch.Tensor]:
        outputs = run_model(run, op, *arguments)
        return [outputs[0][1:]] if rank == 0 and op.segment == 2 else outputs

    run_with("_run_model", shorter, rank, case)


def die_in_the_model(rank: int, case: MeshCase) -> None:
    """The last stage's process is killed in the middle of a step."""

    def dying(run_model: Callable, run: Any, op: Any, *arguments: Any) -> Any:
        if rank == 1 and run.training and op.segment == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_model(run, op, *arguments)

    run_with("_run_model", dying, rank, case)


def have_another_shape(rank: int, case: MeshCase) -> None:
    """The second rank's hidden states are wider."""
    from megatron_dta.core.model.tree_model import TreeGPTModel

    stage_shape = TreeGPTModel.stage_shape

    def wider(self: Any, length: int, context_size: int) -> tuple[int, ...]:
        *rows, hidden = stage_shape(self, length, context_size)
        return (*rows, hidden + rank)

    with mock.patch.object(TreeGPTModel, "stage_shape", wider):
        run_cases(rank, {"": case})


def plan_different_steps(rank: int, case: MeshCase) -> None:
    """The second rank sees one sample less."""
    run_cases(rank, {"": replace(case, partition=[case.partition[0][: len(case.samples) - rank]])})


@pytest.mark.parametrize(
    ("on_rank", "words"),
    [
        (fail_in_the_model, ["a broken kernel\nin F(3) of pipeline stage 1, rank 1", "of pipeline stage 0, rank 0"]),
        (send_a_wrong_shape, ["the message has shape [", "in F(2) of pipeline stage 0, rank 0"]),
        (have_another_shape, ["ranks 0 and 1 of one replica have messages of different shapes"]),
        (plan_different_steps, ["ranks 0 and 1 of one replica have planned different steps"]),
        (die_in_the_model, ["ranks [0, 1] gave no result", "of pipeline stage 0, rank 0"]),
    ],
)
def test_a_failing_stage_is_named_and_ends_the_others(
    on_rank: Callable, words: list[str], case: MeshCase, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError) as raised:
        run_on_ranks(on_rank, case, 2, tmp_path, "gloo")
    assert all(word in str(raised.value) for word in words), raised.value
    if on_rank is die_in_the_model:
        # The other stage was not killed by the test while it waited: it says where it was.
        assert [path.name for path in tmp_path.glob("failed_*.txt")] == ["failed_0.txt"]
