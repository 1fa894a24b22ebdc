"""Checkpoints that all data-parallel ranks write: the same tensors as from the first alone, in about equal shares."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from checkpoint_mesh_cases import assert_same_tensors, in_bf16
from checkpoint_worker import MODEL, Stretch, save_every_way
from megatron_dta.core.config import ParallelConfig
from megatron_dta.training.checkpoint.files import find_checkpoint
from mesh_worker import run_on_ranks

DP2 = ParallelConfig()
SHARDED = ParallelConfig(use_distributed_optimizer=True)
LAYER = replace(MODEL, num_layers=1)
EXPERTS = replace(LAYER, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
EP2 = ParallelConfig(expert_model_parallel_size=2, use_distributed_optimizer=True)


def written_by(folder: Path, num_ranks: int) -> np.ndarray:
    """Bytes of the files of each rank."""
    files = find_checkpoint(folder)
    return np.array([sum(f.stat().st_size for f in files.glob(f"__{rank}_*.distcp")) for rank in range(num_ranks)])


def test_two_ranks_write_the_same_as_one(tmp_path: Path) -> None:
    cases = {
        "replicated": (DP2, LAYER),
        "sharded": (SHARDED, LAYER),
        "bf16": (replace(SHARDED, ddp_bucket_size=300), in_bf16(LAYER)),
        "experts": (EP2, EXPERTS),
    }
    stretches = [Stretch(parallel, 3, tmp_path / name, model=model) for name, (parallel, model) in cases.items()]
    run_on_ranks(save_every_way, stretches, 2, tmp_path / "run")
    for name in cases:
        for way in ("all", "later"):
            assert_same_tensors(tmp_path / name / way, tmp_path / name / "first")
        shares = written_by(tmp_path / name / "all", 2) / written_by(tmp_path / name / "all", 2).sum()
        assert shares.min() > 0.3, (name, shares)
        # Of experts each rank has its own.
        assert written_by(tmp_path / name / "first", 2)[1] == 0 or name == "experts"
