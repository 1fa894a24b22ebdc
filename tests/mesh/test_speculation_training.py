"""A training run with speculation is the run without it: rollouts, weights, metrics; resumed, with trees."""

import json
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from conftest import assert_equal_tensors, seed_all
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.sampling import degenerate
from mesh_worker import run_on_ranks
from rollout_runs import Runs, weights_of
from speculation_training_cases import DATA_PARALLEL, TREES


def records(path: Path) -> tuple[list[dict], list[dict]]:
    """(what does not depend on the clock, the rest) of each step; without what compares the sampler's logprobs with the
    trainer's, which is rounding and may be another one beside more tokens of a sequence."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k != "timing" and not k.startswith("sampler_")} for row in rows]
    assert all(abs(v) < 1e-5 for row in rows for k, v in row.items() if k.startswith("sampler_logprob_gap"))
    return kept, [row["timing"] for row in rows]


@pytest.mark.parametrize("method", ["", TREES], ids=["independent", "treepo"])
def test_the_same_run(method: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(4))
        results = {}
        for speculation in ("none", "das"):
            folder = tmp_path / speculation
            flags = f"--train-iters 2 --save {folder} --rollout-speculation {speculation} {method} "
            # A sampled logprob may round otherwise beside more tokens of its sequence.
            flags += "--old-logprobs recompute"
            trainer, _ = runs.run(flags, "in-process")
            results[speculation] = (weights_of(trainer), *records(folder / "metrics.jsonl"))
    plain, das = results["none"], results["das"]
    assert_equal_tensors(plain[0], das[0])
    assert len(plain[1]) == len(das[1]) == 2
    for without, with_it in zip(plain[1], das[1], strict=True):
        assert without.keys() == with_it.keys()
        for name, value in without.items():
            # How far the sampler's logprobs are from the trainer's is rounding, see above; all else is the same.
            assert with_it[name] == (pytest.approx(value, abs=1e-5) if name.startswith("sampler_") else value), name
    for without, with_it in zip(plain[2], das[2], strict=True):
        assert not any(name.startswith("speculation_") for name in without)
        assert with_it["speculation_tokens_per_forward"] >= 1
        assert with_it["speculation_drafter_tokens"] > 0


STOPPING = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --task arithmetic "
    "--arithmetic-max-operand 9 --rollout-batch-size 3 --n-samples-per-prompt 3 --rollout-max-response-len 40 "
    "--lr 1e-3 --rollout-temperature 0.08 --old-logprobs recompute --seed 3 --train-iters 2 --rollout-stop-degenerate "
    "--save-rollouts-interval 1"
)


@mock.patch.object(degenerate, "_LOOP_TOKENS", 24)
def stopping_run(rank: int, flags: str) -> None:
    from megatron_dta.common.console import Console
    from megatron_dta.training.arguments import parse_arguments
    from megatron_dta.wiring.setup import build_trainer

    trainer = build_trainer(parse_arguments(flags.split()), Console(quiet=True))
    try:
        trainer.run()
    finally:
        trainer.metrics.close()


@mock.patch.object(degenerate, "_LOOP_TOKENS", 24)
def test_stopped_responses_are_counted(tmp_path: Path) -> None:
    """In every step, of all replicas, with drafts: those that end where a scan would stop them."""
    run_on_ranks(stopping_run, f"{STOPPING} --rollout-speculation das --save {tmp_path}/run", 2, tmp_path / "ranks")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        rollouts = load_rollouts(tmp_path / "run" / "rollouts" / f"step_{row['iteration']:07d}.jsonl")
        responses = [rollout.token_ids[rollout.loss_mask] for rollout in rollouts]
        assert row["degenerate_responses"] == sum(degenerate.DegenerateDetector().feed(r) == len(r) for r in responses)
    assert 0 < sum(row["degenerate_responses"] for row in rows) < 2 * 9


def trained_samples(rank: int, job: tuple[str, bool]) -> list[tuple[str, list[int]]]:
    """What a rank's trees hold, after a run or as soon as it has loaded its checkpoint: (problem, text)."""
    from megatron_dta.common.console import Console
    from megatron_dta.core.model.parallel.mesh import current_mesh
    from megatron_dta.training.arguments import parse_arguments
    from megatron_dta.wiring.setup import build_trainer

    flags, runs = job
    trainer = build_trainer(parse_arguments(flags.split()), Console(quiet=True))
    try:
        if runs:
            trainer.run()
    finally:
        trainer.metrics.close()
    kept = trainer.source.state_dict()["speculation"]
    for other in current_mesh().gather_from_all(kept):
        # Megatron compares what is common to all ranks, and prints every number that differs.
        assert other.keys() == kept.keys()
        assert all(np.array_equal(other[name], value) for name, value in kept.items())
    state = trainer.source._engine.drafting.speculator.drafter.state_dict()
    texts = np.split(state["tokens"], np.cumsum(state["lengths"])[:-1])
    return sorted((str(state["problems"][p]), t.tolist()) for p, t in zip(state["problem"], texts, strict=True))


def test_replicas_share_what_they_have_sampled(tmp_path: Path) -> None:
    """The trees of each of two replicas are those of one process, and those that a checkpoint gives to others."""

    def ranks(flags: str, count: int, runs: bool, name: str) -> list[list]:
        return run_on_ranks(trained_samples, (f"{DATA_PARALLEL} {flags}", runs), count, tmp_path / name)

    (alone,) = ranks("--train-iters 2", 1, True, "alone")
    paired = ranks(f"--train-iters 2 --save {tmp_path / 'run'}", 2, True, "two")
    assert paired == [alone, alone]
    assert len(alone) > 10
    assert ranks(f"--train-iters 3 --save {tmp_path / 'run'}", 3, False, "again") == [alone] * 3
