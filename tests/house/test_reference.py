"""docs/reference.md is up to date and lists every metric."""

from pathlib import Path

import pytest
from make_reference import reference

import megatron_dta
from conftest import REPOSITORY, seed_all
from forked import run_python
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.training.arguments import build_parser
from megatron_dta.training.monitor.metric_names import METRICS, is_known
from trainer_cases import make_rollouts, rows_of, run

TASK = (
    "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 4 --n-samples-per-prompt 4 "
    "--rollout-max-response-len 4 --train-iters 2"
)
RUNS = {
    "grpo": f"{TASK} --eval-interval 1 --rollout-speculation das --rollout-stop-degenerate --use-tis "
    "--old-logprobs recompute --kl-loss-coef 0.1 --kl-coef 0.1 "
    "--dynamic-sampling --overlong-buffer-len 2 --num-steps-per-rollout 2",
    "ppo": f"{TASK} --objective ppo --over-sampling-batch-size 6",
    "treepo": f"{TASK} --rollout-method treepo --treepo-segment-length 1",
    "experts": f"{TASK} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01 "
    "--moe-ffn-hidden-size 8",
    "dpo": "--objective dpo --rollouts {0}/r.jsonl --global-batch-size 8 --train-iters 2",
    "sft": "--objective sft --rejection-sampling best --rollouts {0}/r.jsonl --global-batch-size 8 --train-iters 2 "
    "--eval-rollouts {0}/r.jsonl --eval-interval 1",
}


def test_the_page_is_up_to_date() -> None:
    written = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    assert written == reference(), "run python docs/scripts/make_reference.py"


def test_check_notices_a_change(tmp_path: Path) -> None:
    page = tmp_path / "reference.md"
    page.write_text(reference().replace("--lr", "--rl"))
    command = [REPOSITORY / "docs" / "scripts" / "make_reference.py", "--output", page]
    assert run_python([*command, "--check"]).returncode == 1
    assert run_python(command).returncode == 0
    assert run_python([*command, "--check"]).returncode == 0
    assert run_python([*command[:-1], f"{tmp_path}/no/where", "--check"]).returncode == 2


def test_every_flag_is_there() -> None:
    text = reference()
    for action in build_parser()._actions:
        if action.dest != "help":
            assert f"| `{action.option_strings[0]}` |" in text
    for line in text.splitlines():
        if line.startswith("| `"):
            assert line.replace("\\|", "").count("|") in (3, 5), line


@pytest.mark.parametrize("name", RUNS)
def test_metrics_of_runs_are_listed(tmp_path: Path, name: str) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(1), 4, 4))
    run(f"{RUNS[name].format(tmp_path)} --save {tmp_path}/run")
    names = set()
    for row in rows_of(tmp_path / "run" / "metrics.jsonl"):
        names |= set(row) - {"timing"} | {f"timing/{metric}" for metric in row["timing"]}
    assert len(names) > 20
    assert sorted(metric for metric in names if not is_known(metric)) == []


def test_what_is_listed_exists() -> None:
    """Each name stands in the code, whole or behind the prefix that its family gets."""
    code = "".join(
        path.read_text() for path in Path(megatron_dta.__file__).parent.rglob("*.py") if path.name != "metric_names.py"
    )
    for metrics in METRICS.values():
        for name in metrics:
            stems = [
                name,
                name.removeprefix("speculation_"),
                name.removeprefix("rollout_"),
                name.removesuffix("_seconds"),
            ]
            stems += [name.removeprefix("speculation_").split("_{")[0], name.removeprefix("critic_")]
            stems += [name.removeprefix("branches_")]
            assert any(f'"{stem}' in code or f"_{stem}" in code for stem in stems), name


def test_unknown_names_are_unknown() -> None:
    assert is_known("eval_reward")
    assert is_known("eval_pass@8")
    for name in ("rewards", "timing/reward", "eval_token_reuse", "train_seconds", "timing/x_seconds"):
        assert not is_known(name)
