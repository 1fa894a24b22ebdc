"""The trainer with divided experts: same samples, metrics and weights as one process; checkpoints over another mesh."""

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import seed_all
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from mesh_trainer_cases import EXPERTS, SAMPLED, SHARDED, STORED, _compare, job, train_on_rank, write_stored
from mesh_worker import run_on_ranks
from resume_cases import rows_without_timing

EP = "--expert-model-parallel-size 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    stored = f"{STORED} {write_stored(path)} {EXPERTS}"
    half = stored.replace("--train-iters 3", "--train-iters 2")
    sampled = f"{SAMPLED} {EXPERTS}"

    jobs = {
        1: [job(path, "stored-1", stored), job(path, "sampled-1", sampled), job(path, "moved", half)],
        2: [
            job(path, "sharded-ep2", sampled, f"{EP} {SHARDED}"),
            job(path, "sharded-ep2-cut", sampled, f"{EP} {SHARDED} --save-interval 1", "1"),
            job(path, "sharded-ep2-cut", sampled, f"{EP} {SHARDED} --save-interval 1"),
            job(path, "moved", stored, EP),
        ],
    }
    for world_size, of_size in jobs.items():
        run_on_ranks(train_on_rank, of_size, world_size, path / f"ranks-{world_size}")
    return path


def test_metrics_are_those_of_one_process(folder: Path) -> None:
    """Two steps on one process and one, from their checkpoint, on divided experts."""
    rows = rows_without_timing(folder / "moved")
    assert {"seq_load_balancing_loss", "z_loss"} <= rows[1].keys()
    _compare(rows, rows_without_timing(folder / "stored-1"))


def test_samples_are_those_of_one_process(folder: Path) -> None:
    rows, expected = rows_without_timing(folder / "sharded-ep2"), rows_without_timing(folder / "sampled-1")
    _compare(rows, expected)
    assert [row.get("reward") for row in rows] == [row.get("reward") for row in expected]


def test_routing_of_the_rollouts_is_replayed(folder: Path, tmp_path: Path) -> None:
    """A run that replays its sampler's choices differs from one that does not, on two processes as on one."""
    generator, rollouts = seed_all(4), load_rollouts(folder / "train.jsonl")
    routed = [
        replace(rollout, routed_experts=generator.random((len(rollout), 2, 4)).argsort(-1)[..., :2])
        for rollout in rollouts
    ]
    write_rollouts(tmp_path / "routed.jsonl", routed)
    flags = f"{EXPERTS} --moe-routing-replay first --make-vocab-size-divisible-by 2 --old-logprobs recompute"
    command = f"{STORED} --train-iters 2 {flags} --rollouts {tmp_path}/routed.jsonl"
    run_on_ranks(train_on_rank, [(f"{command} --save {tmp_path}/one", None)], 1, tmp_path / "ranks-1")
    run_on_ranks(train_on_rank, [(f"{command} {EP} --save {tmp_path}/two", None)], 2, tmp_path / "ranks-2")
    alone, two = (rows_without_timing(tmp_path / run) for run in ("one", "two"))
    assert [row["loss"] for row in alone] == pytest.approx([row["loss"] for row in two], rel=1e-3, abs=2e-5)
    assert all(0 < row["routing_replaced"] < 1 for row in alone)
    assert [row["routing_replaced"] for row in alone] == [row["routing_replaced"] for row in two]
    run_on_ranks(
        train_on_rank, [(f"{command} --moe-routing-replay fork --save {tmp_path}/fork", None)], 1, tmp_path / "ranks-f"
    )
    fork = rows_without_timing(tmp_path / "fork")
    assert all(row["routing_replaced"] == 0 for row in fork)
    assert [row["routing_forked_tokens"] for row in fork] == [row["routing_forked_tokens"] for row in alone]
    assert all(row["unique_tokens"] > other["unique_tokens"] for row, other in zip(fork, alone, strict=True))
    unrouted = command.replace("routed.jsonl", "plain.jsonl")
    write_rollouts(tmp_path / "plain.jsonl", rollouts)
    with pytest.raises(RuntimeError, match="field 'routed_experts': missing"):
        run_on_ranks(train_on_rank, [(f"{unrouted} --save {tmp_path}/none", None)], 1, tmp_path / "ranks-0")


def test_a_run_goes_on_bit_for_bit(folder: Path) -> None:
    assert rows_without_timing(folder / "sharded-ep2-cut") == rows_without_timing(folder / "sharded-ep2")
