"""Console output of a run: the description before step 1, lines of steps, warnings, token reuse at the end."""

import io
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.common.console import Console
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.tokenizer import build_tokenizer
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.monitor.benefits import benefit_sentences, tree_benefit
from megatron_dta.training.monitor.console import LEGEND, WIDTH, RunConsole, StepClock, step_line
from megatron_dta.training.monitor.metrics import read_metrics
from megatron_dta.training.monitor.run_description import tokenizer_lines
from tokenizers_cases import tokenizer_json  # noqa: F401 (a fixture)
from trainer_cases import make_rollouts, make_trainer, run

SAMPLED = (
    "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 4 --n-samples-per-prompt 3 "
    "--rollout-max-response-len 4 --train-iters 3"
)


def record(iteration: int, **values: object) -> dict:
    """A step of a long run, all of whose figures are long."""
    return {
        "iteration": iteration,
        "loss": -0.123456,
        "reward": -0.98765,
        "grad_norm": 123.45678,
        "response_tokens": 12345.6,
        "ended": 0.987,
        "uniform_groups": 0.25,
        "zero_advantages": 0.25,
        "token_reuse": 12.345,
        "tokens": 70,
        "unique_tokens": 10,
        "timing": {"step_seconds": 1234.5, "tokens_per_second": 1234567.8},
        **values,
    }


def test_lines_of_steps_fit_a_terminal() -> None:
    line = step_line(record(12345), 20000, 1234.5)
    assert len(line) <= WIDTH
    assert line.startswith("step 12345/20000  reward -0.988  grad 123.457  length 12,346  ended 99%  tied 25%")
    assert line.endswith("1,234 s  left 109d09h")
    short = step_line(record(2, timing={"step_seconds": 0.0512, "tokens_per_second": 900.0}, grad_norm=0.5), 4, 30.2)
    assert "loss -0.1235" in short
    assert short.endswith("0.05 s  left 1m00s")
    assert "left" not in step_line(record(4), 4, 1.0)
    # Pairs: the reward of chosen and rejected text is fixed, so the share that the model prefers is what counts.
    preferences = step_line(record(1, dpo_accuracy=0.75, dpo_margin=0.1), 4, 1.0)
    assert "accuracy 75%" in preferences
    assert "reward" not in preferences
    # Supervised training compares no groups, and its loss is what counts.
    supervised = {"iteration": 1, "loss": float("nan"), "uniform_groups": 1.0, "timing": {}}
    assert step_line(supervised, 1, 1.0) == "step 1/1  loss nan"
    assert len(LEGEND) <= WIDTH - 13


def test_the_time_left_is_that_of_recent_steps() -> None:
    """Neither the evaluation before the first step nor the first step, which is slow, count for later ones."""
    now = iter([0.0, 100.0, 150.0, 152.0, *(152.0 + 4 * i for i in range(1, 30))])
    clock = StepClock(lambda: next(now))
    clock.tick(is_step=False)
    clock.tick()
    assert clock.seconds_per_step == 50
    clock.tick()
    assert clock.seconds_per_step == 2
    for _ in range(29):
        clock.tick()
    assert clock.seconds_per_step == 4


def console_of(flags: str, metrics: Path | None = None) -> tuple[RunConsole, io.StringIO]:
    output = io.StringIO()
    config = parse_arguments(f"--num-layers 2 --hidden-size 24 --num-attention-heads 3 {flags}".split())
    return RunConsole(Console(file=output, width=400), config, metrics), output


@pytest.mark.parametrize("dynamic", [False, True])
def test_steps_without_any_difference_are_warned_of(dynamic: bool) -> None:
    console, output = console_of(f"{SAMPLED} --train-iters 20 --max-position-embeddings 32 --log-interval 50")
    without = dict(zero_advantages=1.0, uniform_groups=1.0, reward=0.25) | ({"sampling_rounds": 5.0} if dynamic else {})
    for iteration in range(1, 20):
        console.report(record(iteration, **without if iteration not in (6, 16) else {}))
    _start, *lines = output.getvalue().splitlines()
    assert lines[0] == ("step 1: nothing to learn, all advantages are 0; no group has rewards that differ (mean 0.25)")
    assert lines[1].endswith("--n-samples-per-prompt" if dynamic else ", or --dynamic-sampling")
    told = "steps 1 to 2, steps 1 to 4, step 7, steps 7 to 8, steps 7 to 10, steps 7 to 14, step 17, steps 17 to 18"
    assert ", ".join(line.partition(":")[0] for line in lines[2:]) == told


@pytest.mark.parametrize("reward", [0.5, None])
def test_a_run_without_signal_says_so(tmp_path: Path, reward: float | None) -> None:
    """Equal rewards: gradient norm 0 is explained. Different ones, or advantages that come along: no word of it."""
    flags = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 12 --train-iters 1 --old-logprobs recompute"
    rollouts = make_rollouts(seed_all(1), 4, 3)
    if reward is not None:
        alike = [Rollout(r.token_ids, r.loss_mask, reward=reward, group_id=r.group_id) for r in rollouts]
        rewarded = [
            Rollout(r.token_ids, r.loss_mask, reward=reward, advantages=np.where(r.loss_mask, 0.5, 0), group_id="a")
            for r in rollouts
        ]
        write_rollouts(tmp_path / "r.jsonl", rewarded)
        assert "nothing to learn" not in run(flags)[1]
        rollouts = alike
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    _, text = run(f"{flags} --save {tmp_path}/run")
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (record["grad_norm"] == 0) == (reward is not None)
    assert record["zero_advantages"] == (reward is not None)
    assert ("nothing to learn, all advantages are 0; no group has rewards that differ" in text) == (reward is not None)


def test_what_runs_is_said_before_the_first_step(tmp_path: Path) -> None:
    trainer, text = run(f"{SAMPLED} --save {tmp_path}/run --save-rollouts-interval 2 --eval-interval 3 --lora-rank 2")
    head, steps = text.split("held out, after step 0", 1)
    assert len(re.findall(r"^step \d/3  reward .* [\d.]+ s(?:  left \d+s)?$", steps, re.MULTILINE)) == 3
    lines = dict(line.split(maxsplit=1) for line in head.splitlines())
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    assert 0 < trained < count
    assert lines["model"].startswith(f"{count:,} parameters, {trained:,} trained, float32; 1 layers of 24")
    assert "1 process" in lines["devices"]
    assert "tensor 1, pipeline 1, data 1" in lines["mesh"]
    assert lines["starting"] == "from random weights, seed 1234"
    assert lines["tokenizer"] == (
        "CharacterTokenizer, 16 tokens; responses end with 15 '<eos>' (CharacterTokenizer's own)"
    )
    assert lines["output"] == f"{tmp_path}/run: checkpoints, rollouts, metrics.jsonl"
    assert lines["rollouts"].startswith("4 prompts x 3 at a time, responses of at most 4 tokens")
    assert all(len(line) <= WIDTH for line in head.splitlines() if str(tmp_path) not in line)
    # Weights in float32 are their own master weights: with gradient and moments four numbers, where they are trained.
    size, unit = re.match(r"([\d.]+) (MiB) of weights", lines["memory"]).groups()
    assert float(size) == pytest.approx((4 * count + 12 * trained) / 2**20, abs=0.06)
    assert unit == "MiB"


def test_a_guessed_end_is_said_to_be_one(tokenizer_json: Path, tmp_path: Path) -> None:  # noqa: F811
    def lines(eos: list[int] | None = None, vocab_size: int | None = None) -> list[str]:
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json), eos)
        return [text for _, text in tokenizer_lines(tokenizer, vocab_size)]

    ((eos, guessed), advice) = (re.search(r"end with (\d+) (.*)", lines()[0]).groups(), lines()[1])
    assert guessed == "'<|endoftext|>' (guessed)"
    assert "give --eos-id" in advice
    (given,) = lines([int(eos) + 1])
    assert given.endswith("(--eos-id)")
    (tokenizer_json.parent / "tokenizer_config.json").write_text('{"eos_token": "<extra>"}')
    (named,) = lines()
    assert named.endswith("'<extra>' (tokenizer_config.json)")
    (tokenizer_json.parent / "generation_config.json").write_text('{"eos_token_id": [0, 65]}')
    first, *others = lines(vocab_size=512)
    assert first == named
    assert others[0] == "or with 0 '<|endoftext|>' (generation_config.json)"
    assert re.fullmatch(r"or with 65 '.' \(generation_config.json\)", others[1])
    size = int(re.search(r"(\d+) tokens", first)[1])
    assert others[2] == f"the model's last {512 - size} ids have no text in it and are never sampled"


def test_operations_without_sharing_are_those_of_dense_training(tmp_path: Path) -> None:
    """What a step with trees says of a dense one is what a dense one counts."""
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(2), 6, 4))
    flags = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 8 --train-iters 3"
    records = {}
    for mode in ("dta", "packed", "dense"):
        _, text = run(f"{flags} --tree-mode {mode} --tree-segment-tokens 40 --save {tmp_path}/{mode}")
        records[mode] = read_metrics(tmp_path / mode / "metrics.jsonl")
        assert ("x token reuse" in text) == (mode != "dense")
    for tree, packed, dense in zip(*records.values(), strict=True):
        assert tree["tree_tflop"] < tree["dense_tflop"] == pytest.approx(dense["tree_tflop"], rel=1e-12)
        assert dense["dense_tflop"] == dense["tree_tflop"]
        assert packed["dense_tflop"] == pytest.approx(tree["dense_tflop"], rel=1e-12)
    trainer, _ = make_trainer(flags)
    plan = (
        trainer._next_step(trainer._stopwatch(1))[0]
        .batch(trainer.config.tree, trainer.config.objective, trainer.engine)
        .plan
    )
    lengths = np.diff(plan.sequence_pairs)
    assert StepCounts.without_sharing(plan).rows == lengths.sum()
    assert StepCounts.without_sharing(plan).tokens == plan.num_sequence_tokens


def test_what_trees_were_worth() -> None:
    steps = [record(i, tokens=70, unique_tokens=10, tree_tflop=2.0, dense_tflop=9.0) for i in (1, 2)]
    assert tree_benefit(steps) == (
        "Trees: 7.00x token reuse; without sharing, forward and backward would "
        "have taken 4.50 times the operations (18 TFLOP instead of 4 TFLOP)"
    )
    # Records of older versions lack the operations; a dense run saved nothing.
    assert tree_benefit([record(1)]) == "Trees: 7.00x token reuse"
    assert benefit_sentences([record(1, unique_tokens=70)]) == []
    assert benefit_sentences([{"iteration": 0, "timing": {}}]) == []
