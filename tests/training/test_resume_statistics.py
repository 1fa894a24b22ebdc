"""The statistics of a rollout batch belong to its steps: a run resumed between two steps writes the same metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resume_cases import rows_without_timing
from trainer_cases import make_trainer, run

ENVIRONMENT = """
class Echo:
    def reset(self, record):
        self.turn = 0
    def step(self, action):
        self.turn += 1
        if len(action) == 3:
            raise ValueError
        return ("1", 0.1 * len(action), False) if self.turn < 2 else ("", float(len(action) % 2), True)
"""
REWARD = """
def reward(prompt, response, token_ids):
    if len(token_ids) == 3:
        raise ValueError
    return sum(token_ids) % 7

def even(prompt, response, token_ids):
    return sum(token_ids) % 2
"""
COMMON = "--rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 6 --train-iters 5 "
FILTERS = "--num-steps-per-rollout 2 --task arithmetic --arithmetic-max-operand 3 "


@pytest.mark.parametrize(
    ("flags", "counted"),
    [
        (FILTERS + "--dynamic-sampling --overlong-buffer-len 3", "sampling_rounds uniform_groups overlong_penalty"),
        (FILTERS + "--over-sampling-batch-size 6", "useful_groups rejected_groups left_out_decoded_tokens"),
        (FILTERS + "--environment {0}/echo.py:Echo --rollout-failure drop", "environment_failures"),
        (
            "--prompt-data {0}/prompts.jsonl --tokenizer-type CharacterTokenizer --reward-function {0}/odd.py:reward "
            "--rollout-failure drop --ppo-epochs 2 --kl-loss-coef 0.1 --use-tis --old-logprobs recompute",
            "reward_failures",
        ),
        (
            "--num-steps-per-rollout 2 --rollout-method treepo --treepo-segment-length 2 --leaf-weights both "
            "--reward-function {0}/odd.py:even "
            "--prompt-data {0}/prompts.jsonl --tokenizer-type CharacterTokenizer",
            "effective_leaves fallback_leaves",
        ),
    ],
    ids=["dynamic", "over", "environment", "reward", "leaf weights"],
)
def test_steps_of_a_stopped_collection(tmp_path: Path, flags: str, counted: str) -> None:
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    (tmp_path / "odd.py").write_text(REWARD)
    prompts = [json.dumps({"prompt": f"{i}+{i}=", "answer": 2 * i}) + "\n" for i in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    flags = COMMON + flags.format(tmp_path)
    run(f"{flags} --save {tmp_path}/straight")
    for stop in (1, 3, 5):
        trainer, _ = make_trainer(f"{flags} --save {tmp_path}/stopped")
        plain = trainer._step

        def stopping(plain=plain, trainer=trainer, stop=stop):
            record = plain()
            trainer.signals.name = "SIGTERM" if record["iteration"] == stop else None
            return record

        trainer._step = stopping
        trainer.run()
        trainer.metrics.close()
        assert trainer.progress.iteration == stop
    expected, resumed = (rows_without_timing(tmp_path / name) for name in ("straight", "stopped"))
    assert resumed == expected
    assert all(name in row for row in expected for name in counted.split())
    assert any(row[name] for row in expected for name in counted.split())


def test_the_reference_of_a_continued_run_is_what_it_started_from(tmp_path: Path) -> None:
    """Neither random weights nor those of the checkpoint, and --load may be gone by then."""
    flags = f"{COMMON} {FILTERS} --kl-loss-coef 0.5"
    run(f"{COMMON} {FILTERS} --kl-loss-coef 0.1 --entropy-coef 0.1 --seed 5 --save {tmp_path}/first")
    begin = f"{flags} --load {tmp_path}/first --finetune"
    run(f"{begin} --save {tmp_path}/straight")
    run(f"{begin} --train-iters 3 --save {tmp_path}/stopped")
    (tmp_path / "first").rename(tmp_path / "gone")
    run(f"{begin} --save {tmp_path}/stopped")
    expected, resumed = (rows_without_timing(tmp_path / name) for name in ("straight", "stopped"))
    assert resumed == expected
    assert expected[-1]["ref_kl"] > 0
