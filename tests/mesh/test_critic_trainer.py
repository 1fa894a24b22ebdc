"""PPO and DPO on several processes: the metrics of one process; checkpoints with a critic that move between meshes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import seed_all
from critic_trainer_cases import OWN, PPO
from megatron_dta.rollouts import write_rollouts
from mesh_trainer_cases import SHAPE, SHARDED, _rows, train_on_rank
from mesh_worker import run_on_ranks
from trainer_cases import make_rollouts

DPO = "--objective dpo --dpo-pairs all"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds what runs on one and two processes have left behind; all start from the same weights."""
    path = tmp_path_factory.mktemp("runs")
    write_rollouts(path / "train.jsonl", make_rollouts(seed_all(3), 6, 4))
    common = (
        f"{SHAPE} --make-vocab-size-divisible-by 2 --global-batch-size 8 --tree-segment-tokens 7 "
        f"--rollouts {path}/train.jsonl"
    )
    start = f"{common} {PPO} --train-iters 1 --save {path}/start"

    def job(name: str, flags: str, objective: str = PPO, iters: int = 4) -> tuple[str, None]:
        weights = f"--load {path}/start --finetune" + (f" --critic-load {path}/start" if objective == PPO else "")
        return f"{common} {objective} {flags} {weights} --train-iters {iters} --save {path}/{name}", None

    ones = [(start, None), job("ppo-1", ""), job("dpo-1", "", DPO)]
    twos = [
        job("ppo-tp", TP),
        job("ppo-pp", PP),
        job("ppo-dp", SHARDED),
        job("ppo-cut", SHARDED, iters=3),
        job("ppo-cut", SHARDED),
        job("ppo-moved", TP, iters=3),
        job("ppo-moved", PP),
        job("dpo-dp", "", DPO),
        job("dpo-pp", PP, DPO),
    ]
    for jobs, world_size in ((ones, 1), (twos, 2)):
        run_on_ranks(train_on_rank, jobs, world_size, path / f"ranks-{world_size}")
    return path


@pytest.mark.parametrize("name", ["ppo-tp", "ppo-pp", "ppo-dp", "ppo-moved", "dpo-dp", "dpo-pp"])
def test_a_mesh_trains_as_one_process(folder: Path, name: str) -> None:
    expected, found = _rows(folder / f"{name[:3]}-1"), _rows(folder / name)
    assert len(found) == 4
    for left, right in zip(expected, found, strict=True):
        assert left.keys() == right.keys()
        for key in left.keys() - OWN:
            assert right[key] == pytest.approx(left[key], rel=2e-3, abs=2e-5), (name, key)
    if name.startswith("ppo"):
        assert {"value_loss", "explained_variance", "tis_weight", "sampler_probability_ratio"} <= found[0].keys()


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(folder: Path) -> None:
    assert _rows(folder / "ppo-cut") == _rows(folder / "ppo-dp")
