"""The quickstart's steps in miniature: warm-up, GRPO, rollouts from the checkpoint; and what its report accepts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from forked import run_python
from megatron_dta.core.rollouts.load import load_rollouts

MODEL = [
    *["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"],
    *["--max-position-embeddings", "16", "--vocab-size", "16", "--seed", "3"],
]
TASK = [
    *["--task", "arithmetic", "--arithmetic-max-operand", "9", "--rollout-max-response-len", "3"],
    *["--rollout-batch-size", "4", "--n-samples-per-prompt", "4"],
]


def python(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return run_python(arguments, env=environment)


def test_the_quickstarts_steps(tmp_path: Path):
    """Warm-up from a file, GRPO from its weights, and the tool samples what the next step would have trained on."""
    warmup = str(tmp_path / "warmup.jsonl")
    steps = [
        f"-m megatron_dta.sampling.prompts.arithmetic --output {warmup} --count 64 --arithmetic-max-operand 9".split(),
        [
            *["-m", "megatron_dta.train", *MODEL, "--objective", "sft", "--rollouts", warmup, "--global-batch-size"],
            *["16", "--train-iters", "3", "--lr", "1e-2", "--save", str(tmp_path / "warmup")],
        ],
        [
            *["-m", "megatron_dta.train", *MODEL, *TASK, "--load", str(tmp_path / "warmup"), "--finetune"],
            *["--train-iters", "2", "--lr", "1e-3", "--eval-interval", "1", "--eval-iters", "8"],
            *["--save", str(tmp_path / "grpo")],
        ],
    ]
    for step in steps:
        done = python(*step)
        assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [0, 1, 2]
    assert all(0 <= record["eval_reward"] <= 1 for record in records)
    # At the sampler's weights every ratio is 1: the recorded logprobs are the trainer's.
    assert all(abs(record["ratio"] - 1) < 1e-5 for record in records[1:])

    output = tmp_path / "rollouts.parquet"
    done = python(
        *["tools/sample_rollouts.py", *MODEL, *TASK, "--load", str(tmp_path / "grpo")],
        *["--rollout-batch-index", "2", "--output", str(output)],
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rollouts = load_rollouts(output, vocab_size=16)
    assert len(rollouts) == 16
    assert all(rollout.policy_version == 2 for rollout in rollouts)
    # A third step of the same run trains these very rollouts: it resumes from the checkpoint they were sampled from.
    done = python(*steps[2], "--train-iters", "3")
    assert done.returncode == 0, done.stderr
    third = json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert third["iteration"] == 3
    assert third["tokens"] == sum(len(rollout.token_ids) for rollout in rollouts)
    assert third["reward"] == pytest.approx(np.mean([rollout.reward for rollout in rollouts]))
    assert len({rollout.group_id for rollout in rollouts}) == 4


@pytest.mark.parametrize(("rewards", "status"), [((0.1, 0.5, 0.9), 0), ((0.1, 0.7), 1)])
def test_report(tmp_path: Path, rewards: tuple[float, ...], status: int):
    for name, records in (
        ("warmup", [{"iteration": step, "loss": 3.0 / step} for step in (1, 2, 3)]),
        (
            "grpo",
            [
                {"iteration": step, "eval_reward": reward, "timing": {}}
                | ({"reward": reward, "tokens": 30, "unique_tokens": 10} if step else {})
                for step, reward in enumerate(rewards)
            ],
        ),
    ):
        (tmp_path / name).mkdir()
        lines = [json.dumps(record) + "\n" for record in records]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    done = python("examples/quickstart_report.py", str(tmp_path))
    assert done.returncode == status, done.stderr
    assert ("FAILED" in done.stdout) == (status == 1)
    assert f"{rewards[0]:.3f}" in done.stdout
    assert f"{rewards[-1]:.3f}" in done.stdout
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp"))
