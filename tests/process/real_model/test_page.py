"""The commands of docs/real_model.md, with fewer steps, samples and questions, and the folder that they export."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from conftest import REPOSITORY

FOLDER = os.environ.get("DTA_REAL_MODEL", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="DTA_REAL_MODEL does not name the folder of a real model")

SMALLER = {
    "--train-iters": 2, "--lr-warmup-iters": 0, "--eval-interval": 2, "--rollout-batch-size": 2,
    "--n-samples-per-prompt": 4, "--rollout-max-response-len": 12, "--held-out": 4, "--save-rollouts-interval": 2,
    "--log-interval": 1,
}  # fmt: skip


def test_every_command_of_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "docs" / "real_model.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(FOLDER)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    script = f'megatron-dta() {{ "{sys.executable}" -m megatron_dta "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
    script += "".join(blocks)
    for flag, value in SMALLER.items():
        script = re.sub(rf"({flag}) \S+", rf"\1 {value}", script)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    # The report's status is 1 where two steps have not improved the reward.
    assert "GRPO took the held-out reward from" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("  question ") == 3
    records = [json.loads(line) for line in (tmp_path / "runs/sums/grpo/metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if "eval_reward" in record] == [0, 2]
    assert (tmp_path / "runs/sums/report.html").stat().st_size > 10_000
    exported, source = (
        safe_open(path / "model.safetensors", "np").keys() for path in (tmp_path / "runs/sums/model", Path(FOLDER))
    )
    assert set(exported) == set(source)
