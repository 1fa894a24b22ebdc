"""Training commands on one and two processes, and comparisons of their metrics and weights."""

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import seed_all
from megatron_dta.core.rollouts.load import write_rollouts
from mesh_worker import run_on_ranks
from trainer_cases import MODEL, make_rollouts

# Layers and heads that two ranks can share.
SHAPE = MODEL.replace("--num-layers 1", "--num-layers 2").replace("heads 3", "heads 4 --num-query-groups 2")
STORED = f"{SHAPE} --global-batch-size 8 --train-iters 3 --tree-segment-tokens 18 --untie-embeddings-and-output-weights"
GRPO = "--kl-loss-coef 0.05 --old-logprobs recompute --entropy-coef 0.01 --eval-interval 2"
SAMPLED = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 48 --task arithmetic "
    "--arithmetic-max-operand 9 --rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 5 "
    "--train-iters 3 --num-steps-per-rollout 2 --old-logprobs recompute --eval-interval 3 --eval-iters 3 --lr 1e-3 "
    "--entropy-coef 0.1"
)
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
CP = "--context-parallel-size 2"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"
EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001"
)


# What the ranks of a mesh sum differently, or count for themselves.
OWN = {"unique_tokens", "token_reuse", "segments", "peak_in_flight_tokens", "recomputed_tokens"}


def train_on_rank(rank: int, jobs: list[tuple[str, str | None]]) -> list[dict[str, Any]]:
    """Run commands one after another; a job's second part names a rank that gets a SIGTERM after its first step."""
    from megatron_dta.common.console import Console
    from megatron_dta.core.model.parallel.mesh import destroy_parallel
    from megatron_dta.training.arguments import parse_arguments
    from megatron_dta.training.loop import Trainer
    from megatron_dta.wiring.setup import build_trainer

    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    results = []
    for arguments, terminated in jobs:
        destroy_parallel()
        output = io.StringIO()
        trainer: Trainer = build_trainer(parse_arguments(arguments.split()), Console(file=output, width=300))
        if terminated == str(rank):
            report = trainer._report

            def report_and_stop(record: dict, report: Any = report) -> None:
                report(record)
                if record["iteration"] == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

            trainer._report = report_and_stop
        trainer.run()
        trainer.metrics.close()
        results.append({"iteration": trainer.progress.iteration, "output": output.getvalue()})
    return results


def write_stored(path: Path) -> str:
    """Write rollouts to train and to evaluate on; returns the flags of a run with them."""
    rollouts = make_rollouts(seed_all(3), 12, 4)
    write_rollouts(path / "train.jsonl", rollouts)
    write_rollouts(path / "held_out.jsonl", rollouts[:5])
    return f"{GRPO} --rollouts {path}/train.jsonl --eval-rollouts {path}/held_out.jsonl"


def job(path: Path, name: str, base: str, flags: str = "", terminated: str | None = None) -> tuple[str, str | None]:
    return f"{base} {flags} --save {path}/{name}", terminated


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds what runs on one and two processes have left behind."""
    path = tmp_path_factory.mktemp("runs")
    stored = f"{STORED} {write_stored(path)}"

    # Two ranks pad the vocabulary to an even size. One rank draws the same random weights if it does, too.
    even = f"{stored} --make-vocab-size-divisible-by 2"
    on_one_rank = [job(path, "stored-1", even), job(path, "sampled-1", SAMPLED)]
    twos = [
        job(path, "sampled-tp2", SAMPLED, SP),
        job(path, "sharded-dp2", SAMPLED, SHARDED),
        job(path, "sharded-dp2-cut", SAMPLED, f"{SHARDED} --save-interval 1", "1"),
        job(path, "sharded-dp2-cut", SAMPLED, f"{SHARDED} --save-interval 1"),
        job(path, "sampled-cp2", SAMPLED, f"{CP} {SHARDED}"),
        job(path, "moved", even.replace("--train-iters 3", "--train-iters 2"), f"{CP} --use-distributed-optimizer"),
        job(path, "moved", even, f"{SP} --use-distributed-optimizer"),
    ]
    for jobs, world_size in ((on_one_rank, 1), (twos, 2)):
        for rank in run_on_ranks(train_on_rank, jobs, world_size, path / f"ranks-{world_size}"):
            expected = [1 if cut else 2 if "--train-iters 2" in name else 3 for name, cut in jobs]
            assert [run["iteration"] for run in rank] == expected
    return path


def _compare(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(rows) == len(expected) == 4
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name in row.keys() - OWN:
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=2e-5), (row["iteration"], name)
