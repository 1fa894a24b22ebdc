"""The trainer on several processes: same rollouts, same metrics, same weights as one; checkpoints; SIGTERM."""

import pytest

import mesh_trainer_cases
from mesh_trainer_cases import CP, SAMPLED, SHAPE, SHARDED, TP, _compare, train_on_rank
from mesh_worker import run_on_ranks
from resume_cases import rows_without_timing

# The fixture, under the name that tests use.
folder = mesh_trainer_cases.folder


def test_metrics_are_those_of_one_process(folder):
    """Two steps on context ranks and one, from their checkpoint, on a tensor group, with divided states."""
    _compare(rows_without_timing(folder / "moved"), rows_without_timing(folder / "stored-1"))


@pytest.mark.parametrize("run", ["sampled-tp2", "sharded-dp2", "sampled-cp2"])
def test_samples_are_those_of_one_process(folder, run):
    rows, expected = rows_without_timing(folder / run), rows_without_timing(folder / "sampled-1")
    _compare(rows, expected)
    assert [row.get("reward") for row in rows[:3]] == [row.get("reward") for row in expected[:3]]


@pytest.mark.parametrize(("division", "samplers"), [(TP, 1), (CP, 2)])
def test_the_reward_function_is_called_once_for_each_sample(division, samplers, tmp_path):
    """Of 3 x 5, by one rank of each sampler; context ranks sample apart."""
    calls = tmp_path / "calls"
    (tmp_path / "own.py").write_text(
        "import os\n\ndef reward(prompt, response, token_ids):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n        print(os.getpid(), file=file)\n    return 0.5\n"
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt_token_ids": [{i}, 2]}}\n' for i in range(3)))
    command = (
        f"{SHAPE} {division} --prompt-data {tmp_path}/prompts.jsonl --reward-function {tmp_path}/own.py:reward "
        "--tokenizer-type NullTokenizer --eos-id 8 --rollout-batch-size 3 --n-samples-per-prompt 5 --lr 1e-3 "
        f"--rollout-max-response-len 4 --train-iters 1 --save {tmp_path}/run"
    )
    run_on_ranks(train_on_rank, [(command, None)], 2, tmp_path / "ranks")
    callers = calls.read_text().split()
    assert len(callers) == 15
    assert len(set(callers)) == samplers


def test_a_run_goes_on_bit_for_bit_on_the_same_mesh(folder):
    """A SIGTERM to one process alone stops all of them after the same step."""
    assert rows_without_timing(folder / "sharded-dp2-cut") == rows_without_timing(folder / "sharded-dp2")


def test_a_checkpoint_of_the_other_optimizer_is_refused(folder, tmp_path):
    for run, flags, word in (("sharded-dp2", "", "with"), ("sampled-1", SHARDED, "without")):
        command = f"{SAMPLED} {flags} --load {folder}/{run} --save {tmp_path}/{run}"
        with pytest.raises(RuntimeError, match=f"was written {word} --use-distributed-optimizer"):
            run_on_ranks(train_on_rank, [(command, None)], 1, tmp_path / f"ranks-{run}")
