"""The TreePO quickstart: its flags are valid, and its report compares at equal tokens and names failures."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from conftest import REPOSITORY
from forked import run_python
from megatron_dta.training.arguments import parse_arguments

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


def write_run(folder: Path, tokens_per_step: float, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    rows = [{"iteration": 0, "eval_reward": rewards[0], "timing": {}}]
    for step, reward in enumerate(rewards[1:], start=1):
        rows.append(
            {
                "iteration": step,
                "decoded_tokens": tokens_per_step,
                "rollouts": 8.0,
                "tokens": 60,
                "unique_tokens": 20,
                "eval_reward": reward,
                "timing": {},
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_report(tmp_path: Path):
    last, status = 0.5, 1
    write_run(tmp_path / "grpo", 24.0, [0.1, 0.5, 0.9])
    write_run(tmp_path / "treepo", 16.0, [0.1, 0.3, 0.5, last])
    done = run_python(["examples/quickstart_treepo_report.py", str(tmp_path)])
    assert done.returncode == status, done.stderr
    assert (tmp_path / "reward_by_tokens.png").stat().st_size > 5000
    # Both curves end at 48 tokens; the row before is at 48 * 6 / 7.
    assert re.search(rf"^ +48 +0\.900 +{last:.3f}$", done.stdout, flags=re.MULTILINE)
    assert "24.00 decoded" not in done.stdout
    assert "48 decoded tokens for 16 rollouts (3.00 each)" in done.stdout
    assert ("FAILED" in done.stdout) == bool(status)
