"""The examples: the library without the trainer, the quickstarts and the scratchpad in miniature, and their reports."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY
from forked import run_python
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.training.arguments import parse_arguments


def run(mode: str) -> list[str]:
    command = ["examples/grpo_on_trees.py", "--steps", "3", "--mode", mode]
    done = run_python(command)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


def test_trees_and_separate_sequences_train_alike() -> None:
    trees, dense = run("dta"), run("dense")
    assert len(trees) == 3
    # Loss, gradient norm and clipped share of every step; what differs is the number of computed tokens.
    assert [line.rsplit("  ", 1)[0] for line in trees] == [line.rsplit("  ", 1)[0] for line in dense]
    assert "26 tokens in 18 computed" in trees[0]
    assert "26 tokens in 26 computed" in dense[0]


MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --vocab-size 16 --seed 3"
TASK = (
    "--task arithmetic --arithmetic-max-operand 9 --rollout-max-response-len 3 --rollout-batch-size 4 "
    "--n-samples-per-prompt 4"
)


def python(command: str) -> subprocess.CompletedProcess:
    return run_python(command.split(), env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_quickstarts_steps(tmp_path: Path):
    """Warm-up from a file, GRPO from its weights, and the tool samples what the next step would have trained on."""
    warmup = str(tmp_path / "warmup.jsonl")
    steps = [
        f"-m megatron_dta.sampling.prompts.arithmetic --output {warmup} --count 64 --arithmetic-max-operand 9",
        f"-m megatron_dta.train {MODEL} --objective sft --rollouts {warmup} --global-batch-size 16 --train-iters 3 "
        f"--lr 1e-2 --save {tmp_path}/warmup",
        f"-m megatron_dta.train {MODEL} {TASK} --load {tmp_path}/warmup --finetune --train-iters 2 --lr 1e-3 "
        f"--eval-interval 1 --eval-iters 3 --save {tmp_path}/grpo",
    ]
    for step in steps:
        done = python(step)
        assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [0, 1, 2]
    assert all(0 <= record["eval_reward"] <= 1 for record in records)
    # At the sampler's weights every ratio is 1: the recorded logprobs are the trainer's.
    assert all(abs(record["ratio"] - 1) < 1e-5 for record in records[1:])

    output = tmp_path / "rollouts.parquet"
    flags = f"--load {tmp_path}/grpo --rollout-batch-index 2 --output {output}"
    done = python(f"tools/sample_rollouts.py {MODEL} {TASK} {flags}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rollouts = load_rollouts(output, vocab_size=16)
    assert len(rollouts) == 16
    assert all(rollout.policy_version == 2 for rollout in rollouts)
    # A third step of the same run trains these very rollouts: it resumes from the checkpoint they were sampled from.
    done = python(f"{steps[2]} --train-iters 3")
    assert done.returncode == 0, done.stderr
    third = json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert third["iteration"] == 3
    assert third["tokens"] == sum(len(rollout.token_ids) for rollout in rollouts)
    assert third["reward"] == pytest.approx(np.mean([rollout.reward for rollout in rollouts]))
    assert len({rollout.group_id for rollout in rollouts}) == 4


def write_run(folder: Path, tokens_per_step: float, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    rows = [{"iteration": 0, "eval_reward": rewards[0], "timing": {}}]
    numbers = {"decoded_tokens": tokens_per_step, "rollouts": 8.0, "tokens": 60, "unique_tokens": 20, "timing": {}}
    for step, reward in enumerate(rewards[1:], start=1):
        rows.append({"iteration": step, "reward": reward, "eval_reward": reward, **numbers})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("rewards", "status"), [((0.1, 0.5, 0.9), 0), ((0.1, 0.7), 1)])
def test_report(tmp_path: Path, rewards: tuple[float, ...], status: int):
    write_run(tmp_path / "grpo", 30.0, list(rewards))
    (tmp_path / "warmup").mkdir()
    lines = [json.dumps({"iteration": step, "loss": 3.0 / step}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "warmup" / "metrics.jsonl").write_text("".join(lines))
    done = python(f"examples/quickstart_report.py {tmp_path}")
    assert done.returncode == status, done.stderr
    assert ("FAILED" in done.stdout) == (status == 1)
    assert f"{rewards[0]:.3f}" in done.stdout
    assert f"{rewards[-1]:.3f}" in done.stdout
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp"))


SCRIPT = REPOSITORY / "examples" / "quickstart_treepo.sh"


def shell_variables() -> dict[str, str]:
    """What the script's assignments of flags say, variables in them put in."""
    text = SCRIPT.read_text()
    values = {"out": "OUT", "seed": "1", "warmup_steps": "120"}
    for name in ("model", "task", "training", "shape", "tree"):
        value = re.search(rf"^{name}=\(([^)]*)\)", text, flags=re.MULTILINE).group(1).replace('"', "")
        values[name] = re.sub(r"\$\{?(\w+)(\[@\]\})?", lambda match: values[match.group(1)], value)
    return values


def test_the_scripts_flags():
    """Both runs and their settings; the trees of 8 leaves decode less than 8 independent rollouts."""
    values = shell_variables()
    grpo = parse_arguments(f"{values['model']} {values['task']} {values['training']} --train-iters 800".split())
    trees = parse_arguments(
        f"{values['model']} {values['task']} {values['tree']} {values['training']} --train-iters 960".split()
    )
    assert (grpo.treepo.rollout_method, trees.treepo.rollout_method) == ("independent", "treepo")
    assert (grpo.objective.advantage_estimator, trees.objective.advantage_estimator) == ("grpo", "treepo")
    assert grpo.sampling.n_samples_per_prompt == trees.sampling.n_samples_per_prompt == 8
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


def test_the_report(tmp_path: Path):
    write_run(tmp_path / "grpo", 24.0, [0.1, 0.5, 0.9])
    write_run(tmp_path / "treepo", 16.0, [0.1, 0.3, 0.5, 0.5])
    done = python(f"examples/quickstart_treepo_report.py {tmp_path}")
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "reward_by_tokens.png").stat().st_size > 5000
    # Both curves end at 48 tokens; the row before is at 48 * 6 / 7.
    assert re.search(r"^ +48 +0\.900 +0\.500$", done.stdout, flags=re.MULTILINE)
    assert "24.00 decoded" not in done.stdout
    assert "48 decoded tokens for 16 rollouts (3.00 each)" in done.stdout
    assert "FAILED" in done.stdout


def commands_of(folder: Path, script: str, **environment: str) -> list[list[str]]:
    """Arguments of each Python program that a script starts."""
    recorder, record = folder / "python", folder / "record"
    recorder.write_text(f"#!/usr/bin/env bash\nprintf '%s\\n' \"$@\" '' >> {record}\n")
    recorder.chmod(0o755)
    variables = {**os.environ, "PYTHON": str(recorder), **environment}
    subprocess.run(["bash", f"examples/{script}.sh"], cwd=REPOSITORY, env=variables, check=True, capture_output=True)
    return [command.split("\n") for command in record.read_text().removesuffix("\n\n").split("\n\n")]


SHORT = ["--rollout-max-response-len", "5"]


def test_the_script_in_miniature(tmp_path: Path) -> None:
    commands = commands_of(tmp_path, "scratchpad", SIZE="tiny", OUT=str(tmp_path), STEPS="5", DENSE_STEPS="4")
    assert len(commands) == 6
    for command in commands:
        done = run_python([*command, *(SHORT if "--prompt-data" in command else [])])
        assert done.returncode == 0 or command == commands[-1], done.stderr
    # A model this small learns nothing in five steps, and the report says so.
    assert "FAILED: the held-out reward rose by" in done.stdout, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "summary.json").read_text())["runs"]
    dense, trees = run["rows"]
    assert (dense["mode"], trees["mode"], dense["steps"], trees["steps"]) == ("dense", "dta", 2, 2)
    assert dense["token_reuse"] == 1 < trees["token_reuse"]
    assert {"sampling", "logprobs", "training"} == {
        name.removesuffix("_tokens_per_second") for name in trees if name.endswith("_tokens_per_second")
    }
    assert [step for step, _ in run["held_out_reward"]] == list(range(6))
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / "report.html").read_text()


def test_distillation_in_miniature(tmp_path: Path) -> None:
    """Every command of the script, with later flags that make it small."""
    commands = commands_of(tmp_path, "distillation", OUT=str(tmp_path), STEPS="1", TEACHER_STEPS="2", WARMUP_STEPS="2")
    assert len(commands) == 9
    data = "--count 20 --prompts 20 --held-out 4"
    training = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --lr-warmup-iters 0"
    sampling = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--eval-iters", "2", *SHORT]
    for command in commands:
        small = data if command[0].endswith("scratchpad.py") else training if "-m" in command else ""
        done = run_python([*command, *small.split(), *(sampling if "--prompt-data" in command else [])])
        assert done.returncode == 0, done.stderr
    runs = ["grpo", "teacher", "teacher-and-rewards", "teacher-sampled"]
    last = {name: json.loads((tmp_path / f"run-{name}/metrics.jsonl").read_text().splitlines()[-1]) for name in runs}
    assert [name for name in runs if "teacher_kl" in last[name]] == runs[1:]
    assert list(json.loads((tmp_path / "curves.json").read_text())) == runs
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
