"""Adapter checkpoints continued on other meshes, with and without the distributed optimizer, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_mesh_cases import EXPERTS, ONE, TP2, assert_same_tensors, in_bf16, stretches, tensors_of
from checkpoint_worker import MODEL, run_stretches
from conftest import assert_equal_tensors
from latent_cases import SIZES
from megatron_dta.core.config import ParallelConfig
from mesh_worker import run_on_ranks

LORA = replace(MODEL, lora_rank=3, lora_alpha=5.0, mixer=SIZES, kv_channels=SIZES.query_size)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
EP2 = ParallelConfig(expert_model_parallel_size=2)
ADAPTED_EXPERTS = replace(EXPERTS, lora_rank=2, moe_layer_freq="[0,1]", moe_router_bias_update_rate=0.0)
CASES = {"bf16 sharded": (in_bf16(LORA), True), "experts sharded": (ADAPTED_EXPERTS, True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps in one process, two on another mesh, two more on one process and on a third mesh."""
    folder = tmp_path_factory.mktemp("runs")

    meshes = {"tp2": TP2, "pp2": PP2, "dp2": ONE, "ep2": EP2}

    def run(name: str, world_size: int, *legs: tuple[ParallelConfig, str, str | None]) -> None:
        jobs = [
            stretch
            for case in CASES
            for stretch in stretches(
                folder, {case: CASES[case]}, *(leg for leg in legs if leg[1][:3] in ("one", *_meshes_of(case)))
            )
        ]
        run_on_ranks(run_stretches, jobs, world_size, folder / name)

    run("a", 1, (ONE, "one", None))
    continued = {"tp2": "pp2", "pp2": "tp2", "dp2": "dp2", "ep2": "dp2"}
    run(
        "b",
        2,
        *((parallel, f"{mesh}-4", "one") for mesh, parallel in meshes.items()),
        *((parallel, f"{mesh}-6", f"{continued[mesh]}-4") for mesh, parallel in meshes.items()),
    )
    run("c", 1, (ONE, "one-4", "one"), (ONE, "one-6", "one-4"))
    return folder


def _meshes_of(case: str) -> tuple[str, ...]:
    return ("dp2", "ep2") if "experts" in case else ("tp2", "pp2")


@pytest.mark.parametrize("case", CASES)
def test_every_mesh_continues_every_other(folder: Path, case: str) -> None:
    for steps in (4, 6):
        for mesh in _meshes_of(case):
            tensors = assert_same_tensors(folder / case / f"{mesh}-{steps}", folder / case / f"one-{steps}")
            assert any("lora_B" in name for name in tensors)


@pytest.mark.parametrize("case", CASES)
def test_the_base_stays_the_same(folder: Path, case: str) -> None:
    expected = tensors_of(folder / case / "one" / "base")
    assert not any("_adapter" in name for name in expected)
    for path in (folder / case).iterdir():
        assert_equal_tensors(tensors_of(path / "base"), expected)
