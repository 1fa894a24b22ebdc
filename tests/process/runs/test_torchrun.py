"""Under torchrun a job restarts after a process died, and a wrong flag is named in the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY
from forked import run_python
from megatron_dta.training.monitor.metrics import read_metrics

LAUNCHER = REPOSITORY / "tests" / "helpers" / "elastic_train.py"
COMMAND = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --tokenizer-type "
    "CharacterTokenizer --rollout-max-response-len 4 --rollout-batch-size 4 --n-samples-per-prompt 2 --train-iters 9 "
    "--save-interval 2 --use-distributed-optimizer"
)
# The second process dies in the middle of its sixth step, the first time.
REWARD = """
import os, pathlib, signal

tracker = pathlib.Path({save!r}) / "latest_checkpointed_iteration.txt"

def reward(prompt, response, token_ids):
    late = tracker.exists() and int(tracker.read_text()) >= 4
    if late and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(set(response))
"""


def test_a_killed_process_is_named_and_the_restart_resumes(tmp_path: Path) -> None:
    save = tmp_path / "save"
    (tmp_path / "reward.py").write_text(REWARD.format(save=str(save)))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{a}+1="}) for a in range(12)))
    files = f"--prompt-data {tmp_path}/prompts.jsonl --reward-function {tmp_path}/reward.py:reward --save {save}"
    done = run_python([LAUNCHER, "2", "1", *COMMAND.split(), *files.split()])
    print(done.stdout[-2000:], done.stderr[-3000:])
    assert done.returncode == 0
    assert "error: died: rank 1 in" in done.stderr
    assert "continuing" in done.stdout
    assert [row["iteration"] for row in read_metrics(save / "metrics.jsonl")] == list(range(1, 10))


def test_the_refusal_is_the_last_line() -> None:
    """Written when the launcher's interpreter ends, so it is one of its own."""
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}
    command = [sys.executable, LAUNCHER, "2", "0", "--lr", "-1", "--num-layers", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith("error")
    assert "the following arguments are required" in lines[-1]
    assert any("ChildFailedError" in line for line in lines[:-1])
