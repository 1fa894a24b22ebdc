"""Training on sampled trees: the loop on one and several processes, resuming, and every engine that samples."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.rollouts.paths import decoded_tokens
from megatron_dta.sampling.task import build_task
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.wiring.engines import build_engine
from megatron_dta.wiring.sources import build_sampling_source
from mesh_trainer_cases import train_on_rank
from mesh_worker import run_on_ranks
from resume_cases import rows_without_timing

ENVIRONMENT = """
class Twice:
    '''Asks again once, with the first digit of the answer, then judges.'''
    def reset(self, record):
        self.answer, self.turn = str(record["answer"]), 0
    def step(self, action):
        self.turn += 1
        return self.answer[0] + "=", float(action == self.answer), self.turn == 2
"""
SAMPLED = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 48 --task arithmetic "
    "--arithmetic-max-operand 9 --rollout-batch-size 3 --n-samples-per-prompt 5 --rollout-max-response-len 9 "
    "--train-iters 4 --num-steps-per-rollout 3 --eval-interval 4 --eval-iters 5 --lr 1e-3 --rollout-method treepo "
    "--treepo-segment-length 2 --advantage-estimator treepo_segment --leaf-weights both --entropy-coef 0.1 "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs of one and of two processes, with and without an environment; those that stages repeat share weights."""
    path = tmp_path_factory.mktemp("trees")
    (path / "twice.py").write_text(ENVIRONMENT)
    turns = f"{SAMPLED} --environment {path}/twice.py:Twice"
    started = f"{SAMPLED} --load {path}/start --finetune"
    single = [
        (f"{SAMPLED} --train-iters 1 --save {path}/start", None),
        (f"{started} --save {path}/one", None),
        (f"{turns} --save {path}/turns", None),
        # The first step of the second rollout batch and no more, then on from there.
        (f"{started} --save {path}/broken --train-iters 2", None),
        (f"{started} --save {path}/broken", None),
    ]
    single.append((f"{SAMPLED} --over-sampling-batch-size 8 --save {path}/dynamic", None))
    run_on_ranks(train_on_rank, single, 1, path / "single")
    twos = [f"{turns} --save {path}/dp", f"{started} --pipeline-model-parallel-size 2 --save {path}/pp"]
    run_on_ranks(train_on_rank, [(command, None) for command in twos], 2, path / "ranks")
    return path


@pytest.mark.parametrize(("name", "reference"), [("pp", "one"), ("dp", "turns")])
def test_several_processes_sample_the_same_trees(folder: Path, name: str, reference: str):
    """Counts are equal and sums agree to rounding: each rank's part of the trees is the one process's."""
    rows, expected = rows_without_timing(folder / name), rows_without_timing(folder / reference)
    assert len(rows) == len(expected) == 5
    for row, other in zip(rows, expected, strict=True):
        for key in ("rollouts", "decoded_tokens", "reward", "fallback_leaves", "weighted_reward", "tokens"):
            assert row.get(key) == pytest.approx(other.get(key), abs=1e-6), key
        for key in ("loss", "grad_norm", "ratio", "eval_reward", "environment_steps"):
            if other.get(key) is not None:
                assert row[key] == pytest.approx(other[key], abs=2e-5), key


def test_ratios_are_one_at_the_samplers_weights(folder: Path):
    for name in ("one", "turns"):
        rows = rows_without_timing(folder / name)
        assert abs(rows[1]["ratio"] - 1) < 1e-5
        assert rows[1]["decoded_tokens"] < rows[1]["rollouts"] * rows[1]["response_tokens"]
        assert rows[1]["effective_leaves"] <= 5


def test_a_continued_run_is_the_unbroken_one(folder: Path):
    """The checkpoint falls between steps of a rollout batch: prepared samples keep their weights."""
    broken, unbroken = rows_without_timing(folder / "broken"), rows_without_timing(folder / "one")
    assert [row["iteration"] for row in broken] == [row["iteration"] for row in unbroken]
    for row, other in zip(broken, unbroken, strict=True):
        for key in ("loss", "grad_norm", "reward", "decoded_tokens"):
            assert row.get(key) == other.get(key), (row["iteration"], key)


def test_turns_are_counted(folder: Path):
    rows = rows_without_timing(folder / "turns")
    assert all(row["environment_steps"] > 0 for row in rows[1:])
    assert all(row["environment_failures"] == 0 for row in rows[1:])
    assert np.isfinite([row["loss"] for row in rows[1:]]).all()


def test_dynamic_sampling(folder: Path):
    """Eight prompts are sampled, three are trained."""
    for row in rows_without_timing(folder / "dynamic")[1:]:
        assert row["rejected_groups"] + row["useful_groups"] == 8
        assert row["left_out_decoded_tokens"] > 0
        assert row["rollouts"] == 5  # a third of a rollout batch's 15


def test_the_engine_computes_no_prefix_twice_and_waits_for_nothing():
    """Children share their parent's K and V: besides prompts, one token a request; passes are as many as tokens of the
    longest response, since paths fork in the pass that ends their segment.
    """
    settings = f"{SAMPLED} --rollout-batch-size 6 --n-samples-per-prompt 8 --treepo-segment-length 3"
    config = parse_arguments(settings.replace("--rollout-max-response-len 9", "--rollout-max-response-len 24").split())
    task = build_task(config.sampling, 48)
    model_config = replace(config.model, vocab_size=task.tokenizer.vocab_size)
    engine = build_engine(config.sampling, build_model(model_config, initialize_parallel(3)))
    rollouts = build_sampling_source(engine, task, config).next_batch(0)
    statistics = engine.statistics()
    prompts = {rollout.group_id: int(rollout.segment_ends[0]) for rollout in rollouts}
    assert statistics["decoded_tokens"] == decoded_tokens(rollouts)
    assert statistics["prefilled_tokens"] <= sum(prompts.values()) + statistics["requests"]
    assert statistics["reused_tokens"] > 3 * statistics["prefilled_tokens"]
    assert not any(rollout.fallback for rollout in rollouts)
    longest = max(np.count_nonzero(rollout.loss_mask) for rollout in rollouts)
    assert statistics["forwards"] <= longest + 1
    assert engine.pages_in_use == 0
