"""Checkpoints of models with experts: saved on one division of the experts, loaded on another, optimizer included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_mesh_cases import ONE, assert_same_tensors, tensors_of
from checkpoint_worker import MODEL, Stretch, run_stretches
from megatron_dta.config import ParallelConfig
from mesh_worker import run_on_ranks
from moe_checkpoint_cases import EXPERTS, HALF

EP2 = ParallelConfig(expert_model_parallel_size=2)
CASES = {"fp32": (EXPERTS, False), "bf16": (HALF, False), "fp32 sharded": (EXPERTS, True), "bf16 sharded": (HALF, True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every case: two steps on one mesh, then two on another, in several orders."""
    folder = tmp_path_factory.mktemp("runs")

    def stretches(*legs: tuple[ParallelConfig, str, str | None]) -> list[Stretch]:
        return [
            Stretch(
                replace(parallel, use_distributed_optimizer=sharded),
                2,
                folder / case / save,
                folder / case / load if load is not None else None,
                seed=17 if load is None else 18,
                model=model,
            )
            for case, (model, sharded) in CASES.items()
            for parallel, save, load in legs
        ]

    run_on_ranks(run_stretches, stretches((ONE, "one", None), (ONE, "one-4", "one")), 1, folder / "a")
    pairs = stretches(
        (EP2, "ep2", None),
        (EP2, "ep2-4", "one"),
        (EP2, "ep2-6", "ep2-4"),
        (ONE, "ep2-dp2", "ep2-4"),
        (EP2, "dp2-ep2", "ep2"),
    )
    run_on_ranks(run_stretches, pairs, 2, folder / "b")
    alone = stretches((ONE, "one-6", "one-4"), (ONE, "ep2-one", "ep2-4"))
    run_on_ranks(run_stretches, alone, 1, folder / "c")
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("found", "expected"),
    [("ep2", "one"), ("ep2-4", "one-4"), ("ep2-6", "one-6"), ("ep2-dp2", "one-6"), ("ep2-one", "one-6")],
)
def test_every_division_of_the_experts_goes_on_alike(folder: Path, case: str, found: str, expected: str) -> None:
    assert_same_tensors(folder / case / found, folder / case / expected)


def test_experts_are_whole_and_differ(folder: Path) -> None:
    tensors = tensors_of(folder / "fp32" / "ep2")
    for layer in range(MODEL.num_layers):
        experts = tensors[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"]
        assert len(experts) == EXPERTS.num_experts
        assert len({tuple(expert.flatten().tolist()) for expert in experts}) == EXPERTS.num_experts
