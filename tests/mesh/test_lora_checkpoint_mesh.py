"""Checkpoints of adapters continued on other meshes, with and without the distributed optimizer: bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_mesh_cases import ONE, TP2, tensors_of
from checkpoint_worker import MODEL, Stretch, run_stretches
from megatron_dta.config import ModelConfig, ParallelConfig
from mesh_worker import run_on_ranks

LORA = replace(MODEL, lora_rank=3, lora_alpha=5.0)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
EP2 = ParallelConfig(expert_model_parallel_size=2)
EXPERTS = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    vocab_size=37,
    swiglu=True,
    disable_bias_linear=True,
    num_experts=4,
    moe_ffn_hidden_size=16,
    moe_layer_freq="[0,1]",
    lora_rank=2,
)
CASES = {
    "fp32": (LORA, False),
    "bf16 sharded": (replace(LORA, bf16=True, params_dtype=torch.bfloat16), True),
    "experts sharded": (EXPERTS, True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps in one process, two on another mesh, two more on one process and on a third mesh."""
    folder = tmp_path_factory.mktemp("runs")

    def stretches(world_size: int, legs: list[tuple[str, str | None]]) -> list[Stretch]:
        found = []
        for case, (model, sharded) in CASES.items():
            meshes = {"one": ONE, "tp2": TP2, "pp2": PP2, "dp2": ONE, "ep2": EP2}
            for save, load in legs:
                name = save.split("-")[0]
                if (name in ("tp2", "pp2")) if "experts" in case else (name == "ep2"):
                    continue
                parallel = replace(meshes[name], use_distributed_optimizer=sharded)
                target = folder / case / save
                source = None if load is None else folder / case / load.replace("MESH", name)
                found.append(Stretch(parallel, 2, target, source, seed=17 if load is None else 18, model=model))
        return found

    run_on_ranks(run_stretches, stretches(1, [("one", None)]), 1, folder / "a")
    legs: list[tuple[str, str | None]] = [(f"{mesh}-4", "one") for mesh in ("tp2", "pp2", "dp2", "ep2")]
    legs += [("tp2-6", "pp2-4"), ("pp2-6", "tp2-4"), ("dp2-6", "dp2-4"), ("ep2-6", "dp2-4")]
    run_on_ranks(run_stretches, stretches(2, legs), 2, folder / "b")
    run_on_ranks(run_stretches, stretches(1, [("one-4", "one"), ("one-6", "one-4")]), 1, folder / "c")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_mesh_continues_every_other(folder: Path, case: str) -> None:
    meshes = ("dp2", "ep2") if "experts" in case else ("tp2", "pp2", "dp2")
    for steps in (4, 6):
        expected = tensors_of(folder / case / f"one-{steps}")
        assert any("lora_B" in name for name in expected)
        assert any(name.startswith("optimizer.") and "exp_avg_sq" in name for name in expected)
        for mesh in meshes:
            found = tensors_of(folder / case / f"{mesh}-{steps}")
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                assert torch.equal(values, found[name]), f"{mesh} {name}"


@pytest.mark.parametrize("case", CASES)
def test_the_base_stays_the_same(folder: Path, case: str) -> None:
    expected = tensors_of(folder / case / "one" / "base")
    assert not any("_adapter" in name for name in expected)
    for path in (folder / case).iterdir():
        found = tensors_of(path / "base")
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(values, found[name]), f"{path.name} {name}"
