"""PPO and DPO on several processes, also with experts: one process's metrics; checkpoints that move between meshes."""

from pathlib import Path

import pytest

from conftest import seed_all
from megatron_dta.core.rollouts.load import write_rollouts
from mesh_trainer_cases import EXPERTS, OWN, SHAPE, SHARDED, train_on_rank
from mesh_worker import run_on_ranks
from resume_cases import rows_without_timing
from trainer_cases import make_rollouts

PPO = "--objective ppo --old-logprobs recompute --use-tis --kl-coef 0.1 --ppo-epochs 2 --critic-lr 5e-3"
DPO = "--objective dpo --dpo-pairs all"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
EP = "--expert-model-parallel-size 2"
CP = "--context-parallel-size 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds what runs on one and two processes have left behind; all start from the same weights."""
    path = tmp_path_factory.mktemp("runs")
    write_rollouts(path / "train.jsonl", make_rollouts(seed_all(3), 6, 4))
    common = (
        f"{SHAPE} --make-vocab-size-divisible-by 2 --global-batch-size 6 --tree-segment-tokens 18 "
        f"--rollouts {path}/train.jsonl"
    )
    moe = f"{EXPERTS} {PPO}"

    def job(name: str, flags: str, objective: str = PPO, iters: int = 2) -> tuple[str, None]:
        start = path / ("start-moe" if objective == moe else "start")
        weights = f"--load {start} --finetune" + ("" if objective == DPO else f" --critic-load {start}")
        if objective == PPO:
            weights += f" --eval-rollouts {path}/train.jsonl --eval-interval 1 --eval-iters 2"
        return f"{common} {objective} {flags} {weights} --train-iters {iters} --save {path}/{name}", None

    on_one_rank = [(f"{common} {PPO} --train-iters 1 --save {path}/start", None), job("ppo-1", "", iters=3)]
    on_one_rank += [(f"{common} {moe} --train-iters 1 --save {path}/start-moe", None), job("moe-1", "", moe)]
    on_one_rank += [job("dpo-1", "", DPO)]
    twos = [
        job("ppo-dp", SHARDED),
        job("ppo-cut", SHARDED, iters=1),
        job("ppo-cut", SHARDED),
        job("ppo-moved", TP, iters=1),
        job("ppo-moved", PP, iters=3),
        job("ppo-cp", f"{CP} {SHARDED}"),
        job("dpo-pp", PP, DPO),
        job("moe-dp", f"{EP} {SHARDED}", moe),
    ]
    for jobs, world_size in ((on_one_rank, 1), (twos, 2)):
        run_on_ranks(train_on_rank, jobs, world_size, path / f"ranks-{world_size}")
    return path


@pytest.mark.parametrize("name", ["ppo-dp", "ppo-cp", "ppo-moved", "dpo-pp", "moe-dp"])
def test_a_mesh_trains_as_one_process(folder: Path, name: str) -> None:
    expected, actual = rows_without_timing(folder / f"{name[:3]}-1"), rows_without_timing(folder / name)
    # Of two steps behind a move the second shows what the first did to the weights.
    assert [row["iteration"] for row in actual][-2:] == ([2, 3] if "moved" in name else [1, 2])
    for left, right in zip(expected[: len(actual)], actual, strict=True):
        assert left.keys() == right.keys()
        for key in left.keys() - OWN:
            assert right[key] == pytest.approx(left[key], rel=2e-3, abs=2e-5), (name, key)
    if name.startswith("moe"):
        assert {"critic_seq_load_balancing_loss", "critic_z_loss"} <= actual[-1].keys()
    if name.startswith("ppo"):
        assert {"value_loss", "explained_variance", "tis_weight", "sampler_probability_ratio"} <= actual[-1].keys()


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(folder: Path) -> None:
    assert rows_without_timing(folder / "ppo-cut") == rows_without_timing(folder / "ppo-dp")
