"""Steps of a stopped and continued rollout batch: their statistics, and the files of what they train."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer
from resume_cases import rows_without_timing
from trainer_cases import make_rollouts, make_trainer, run, run_until

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
COMMON = "--rollout-batch-size 4 --n-samples-per-prompt 5 --rollout-max-response-len 6 --train-iters 4 "
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
    for stop in (3, 4):  # within the second batch
        assert run_until(stop, f"{flags} --save {tmp_path}/stopped").progress.iteration == stop
    expected, resumed = (rows_without_timing(tmp_path / name) for name in ("straight", "stopped"))
    assert resumed == expected
    assert all(name in row for row in expected for name in counted.split())
    assert any(row[name] for row in expected for name in counted.split())


def test_the_reference_of_a_continued_run_is_what_it_started_from(tmp_path: Path) -> None:
    """Neither random weights nor those of the checkpoint, and --load may be gone by then."""
    flags = f"{COMMON} {FILTERS} --kl-loss-coef 0.5"
    run(f"{COMMON} {FILTERS} --kl-loss-coef 0.1 --seed 5 --train-iters 2 --save {tmp_path}/first")
    begin = f"{flags} --load {tmp_path}/first --finetune"
    run(f"{begin} --save {tmp_path}/straight")
    run(f"{begin} --train-iters 2 --save {tmp_path}/stopped")
    (tmp_path / "first").rename(tmp_path / "gone")
    run(f"{begin} --save {tmp_path}/stopped")
    expected, resumed = (rows_without_timing(tmp_path / name) for name in ("straight", "stopped"))
    assert resumed == expected
    assert expected[-1]["ref_kl"] > 0


TASK = (
    "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 4 --n-samples-per-prompt 3 "
    "--rollout-max-response-len 4 --num-steps-per-rollout 2 --train-iters 7"
)


def test_chosen_steps_are_written_with_what_they_train(tmp_path: Path) -> None:
    seed_all(1)
    flags = f"{TASK} --save {tmp_path} --save-rollouts-interval 3"
    trainer, _ = make_trainer(flags + " --seed 3")
    trained = {}
    plain = trainer._next_step

    def watched(watch):
        step, sampled = plain(watch)
        trained[trainer.progress.iteration + 1] = step
        return step, sampled

    trainer._next_step = watched
    trainer.run()
    trainer.metrics.close()
    folder = tmp_path / "rollouts"
    assert sorted(path.name for path in folder.glob("*.jsonl")) == [f"step_{i:07d}.jsonl" for i in (1, 3, 6)]
    for iteration in (1, 3, 6):
        rollouts = load_rollouts(folder / f"step_{iteration:07d}.jsonl")
        samples = trained[iteration].samples
        assert len({rollout.group_id for rollout in rollouts}) == 2
        for rollout, sample in zip(rollouts, samples, strict=True):
            np.testing.assert_array_equal(rollout.token_ids, sample.token_ids)
            np.testing.assert_array_equal(rollout.advantages, sample.advantages.astype(np.float32))
            assert rollout.reward in (0.0, 1.0)
        texts = json.loads((folder / f"step_{iteration:07d}_tokens.json").read_text())
        ids = {str(token) for rollout in rollouts for token in rollout.token_ids}
        assert texts.keys() == ids
        assert "".join(texts[str(token)] for token in rollouts[0].token_ids[:4]).count("+") == 1
        runs = json.loads((folder / f"step_{iteration:07d}_texts.json").read_text())
        for rollout, parts in zip(rollouts, runs, strict=True):
            assert sum(count for count, _, _ in parts) == len(rollout)
            assert re.fullmatch(r"\d\+\d=", parts[0][1])
            assert not rollout.loss_mask[: parts[0][0]].any()
            ended = rollout.token_ids[-1] == CharacterTokenizer().eos_id
            assert (parts[-1] == [1, "<eos>", True]) == ended


def test_stored_rollouts_have_no_text(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(2), 4, 3))
    run(
        f"--rollouts {tmp_path}/r.jsonl --global-batch-size 6 --train-iters 2 --save {tmp_path}/run "
        "--save-rollouts-interval 2"
    )
    names = sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir())
    assert names == ["step_0000001.jsonl", "step_0000002.jsonl"]
    assert len(load_rollouts(tmp_path / "run" / "rollouts" / names[0])) == 6


def test_a_run_that_was_stopped_has_the_same_files(tmp_path: Path) -> None:
    flags = f"{TASK} --save-rollouts-interval 1 --save-interval 1 --train-iters"
    run(f"{flags} 5 --save {tmp_path}/straight")
    run(f"{flags} 3 --save {tmp_path}/stopped")
    run(f"{flags} 5 --save {tmp_path}/stopped")
    straight, stopped = (sorted((tmp_path / name / "rollouts").iterdir()) for name in ("straight", "stopped"))
    assert [path.name for path in stopped] == [path.name for path in straight]
    assert len(straight) == 18  # step 6 is prepared with step 5
    for left, right in zip(straight, stopped, strict=True):
        assert left.read_bytes() == right.read_bytes()
