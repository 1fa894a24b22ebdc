"""The scratchpad example: its problems and careless teacher, its script in miniature, and what its report compares; the
script of distillation, which trains on its problems.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from conftest import REPOSITORY
from forked import run_python


def commands_of(folder: Path, script: str, **environment: str) -> list[list[str]]:
    """Arguments of each Python program that a script starts."""
    recorder, record = folder / "python", folder / "record"
    recorder.write_text(f"#!/usr/bin/env bash\nprintf '%s\\n' \"$@\" '' >> {record}\n")
    recorder.chmod(0o755)
    variables = {**os.environ, "PYTHON": str(recorder), **environment}
    subprocess.run(["bash", f"examples/{script}.sh"], cwd=REPOSITORY, env=variables, check=True, capture_output=True)
    return [command.split("\n") for command in record.read_text().removesuffix("\n\n").split("\n\n")]


def test_the_script_in_miniature(tmp_path: Path) -> None:
    commands = commands_of(tmp_path, "scratchpad", SIZE="tiny", OUT=str(tmp_path), STEPS="6", DENSE_STEPS="4")
    assert len(commands) == 6
    for command in commands:
        done = run_python(command)
        assert done.returncode == 0 or command == commands[-1], done.stderr
    # A model this small learns nothing in six steps, and the report says so.
    assert "FAILED: the held-out reward rose by" in done.stdout, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "summary.json").read_text())["runs"]
    dense, trees = run["rows"]
    assert (dense["mode"], trees["mode"], dense["steps"], trees["steps"]) == ("dense", "dta", 2, 2)
    assert dense["token_reuse"] == 1 < trees["token_reuse"]
    assert {"sampling", "logprobs", "training"} == {
        name.removesuffix("_tokens_per_second") for name in trees if name.endswith("_tokens_per_second")
    }
    assert [step for step, _ in run["held_out_reward"]] == list(range(7))
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / "report.html").read_text()


def test_distillation_in_miniature(tmp_path: Path) -> None:
    """Every command of the script, with later flags that make it small."""
    commands = commands_of(tmp_path, "distillation", OUT=str(tmp_path), STEPS="1", TEACHER_STEPS="2", WARMUP_STEPS="2")
    assert len(commands) == 9
    data = "--count 20 --prompts 20 --held-out 4"
    training = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --lr-warmup-iters 0"
    sampling = "--rollout-batch-size 2 --n-samples-per-prompt 2 --eval-iters 2"
    for command in commands:
        small = data if command[0].endswith("scratchpad.py") else training if "-m" in command else ""
        done = run_python([*command, *small.split(), *(sampling.split() if "--prompt-data" in command else [])])
        assert done.returncode == 0, done.stderr
    runs = ["grpo", "teacher", "teacher-and-rewards", "teacher-sampled"]
    last = {name: json.loads((tmp_path / f"run-{name}/metrics.jsonl").read_text().splitlines()[-1]) for name in runs}
    assert [name for name in runs if "teacher_kl" in last[name]] == runs[1:]
    assert list(json.loads((tmp_path / "curves.json").read_text())) == runs
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
