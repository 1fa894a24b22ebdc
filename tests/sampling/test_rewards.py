"""Rewards and their forms, the arithmetic task, and the sampling source and evaluation."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import run_python
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.sampling.config import SamplingConfig
from megatron_dta.sampling.prompts.arithmetic import ArithmeticTask
from megatron_dta.sampling.rewards.registry import Response, exact_match, load_reward_function
from megatron_dta.sampling.rewards.scoring import Scorer, counted
from megatron_dta.sampling.sources.independent import SamplingEvaluation, SamplingSource
from megatron_dta.sampling.task import ResponseReader, build_task
from megatron_dta.wiring.engines import build_engine
from one_reward import compute_reward

USER_REWARDS = """
def length(prompt, response, response_token_ids):
    prompt["answer"] = "changed"
    response_token_ids.clear()
    return len(response)

def flag(prompt, response, response_token_ids):
    return response == "19"

"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(USER_REWARDS)
    return file


def test_user_reward(user_file: Path):
    record, ids = {"answer": 19}, [1, 9, 15]
    assert compute_reward(load_reward_function(f"{user_file}:length"), "p", record, "19", ids) == 2.0
    assert record == {"answer": 19}
    assert ids == [1, 9, 15]
    assert compute_reward(load_reward_function(f"{user_file}:flag"), "p", record, "19", ids) == 1.0
    assert compute_reward(lambda *_: np.float32(0.5), "p", record, "19", ids) == 0.5
    assert compute_reward(lambda *_: np.bool_(True), "p", record, "19", ids) == 1.0


def test_bad_reward_flags(user_file: Path, tmp_path: Path):
    syntax = tmp_path / "syntax.py"
    syntax.write_text("def f(:\n")
    forms = tmp_path / "forms.py"
    forms.write_text("def two(prompt, response): return 1.0\ndef verl(solution_str, threshold): return 1.0\n")
    for spec, message in (
        ("best", "must be exact_match, math_verify, code_tests, remote or FILE.py:NAME"),
        (f"{tmp_path}/none.py:f", "of a file that exists"),
        (f"{user_file}:missing", "no function or class missing"),
        (f"{syntax}:f", r"the file does not run: SyntaxError: invalid syntax \(syntax.py, line 1\)$"),
        (f"{forms}:two", r"two\(prompt, response\): too many .* parameters \(prompt, response, token_ids\)"),
        (f"{forms}:verl", r"missing .*'threshold'; give it the parameters \(solution_str\)"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            load_reward_function(spec)
        assert "\n" not in str(caught.value)


def test_exact_match():
    for answer, response, expected in ((19, "19", 1), ("19", " 19 ", 1), (19, "190", 0), (-2, "-2", 1), (19, "", 0)):
        assert compute_reward(exact_match, "p", {"answer": answer}, response, []) == expected
    with pytest.raises(InputError, match="no field 'answer'"):
        compute_reward(exact_match, "p", {}, "19", [])


@pytest.mark.parametrize("max_operand", [12, 1])
def test_arithmetic_split(max_operand: int):
    task = ArithmeticTask(max_operand)
    train, held_out = task.train_prompts, task.held_out_prompts
    assert len(held_out) == max(1, (max_operand + 1) ** 2 // 5)

    def keys(prompts):
        for prompt in prompts:
            text = prompt.prompt_id.removesuffix("=")
            left, right = map(int, text.split("+"))
            assert prompt.record["answer"] == left + right
            assert task.tokenizer.decode(prompt.token_ids) == prompt.record["question"] == text + "="
            assert len(str(left + right)) + 1 <= task.longest_answer_tokens
            yield min(left, right), max(left, right)

    train_keys, held_out_keys = list(keys(train)), list(keys(held_out))
    assert not set(train_keys) & set(held_out_keys)
    assert len(train) + len(held_out) <= (max_operand + 1) ** 2
    assert len(set(train_keys) | set(held_out_keys)) == (max_operand + 1) * (max_operand + 2) // 2
    again = ArithmeticTask(max_operand)
    assert [p.prompt_id for p in again.held_out_prompts] == [p.prompt_id for p in held_out]
    other = ArithmeticTask(max_operand, seed=1)
    assert max_operand == 1 or [p.prompt_id for p in other.held_out_prompts] != [p.prompt_id for p in held_out]


def test_warmup_rollouts_are_right_answers(tmp_path: Path):
    output = tmp_path / "warmup.jsonl"
    command = ["-m", "megatron_dta.sampling.prompts.arithmetic", "--output", output, "--count", 300]
    run_python([*command, "--arithmetic-max-operand", "19"])
    task = ArithmeticTask(19)
    held_out = {prompt.prompt_id for prompt in task.held_out_prompts}
    rollouts = load_rollouts(output, vocab_size=task.tokenizer.vocab_size)
    assert len(rollouts) == 300
    for rollout in rollouts:
        question = task.tokenizer.decode(rollout.token_ids[~rollout.loss_mask])
        trained = rollout.token_ids[rollout.loss_mask]
        assert question not in held_out
        assert question.endswith("=")
        assert trained[-1] == task.tokenizer.eos_id
        # eval is safe here: the alphabet holds digits and operators only
        assert int(task.tokenizer.decode(trained)) == eval(question[:-1])


def small_model(vocab_size: int):
    device = initialize_parallel(3)
    config = ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=vocab_size, max_position_embeddings=32,
        init_method_std=0.3, params_dtype=torch.float64,
    )  # fmt: skip
    return build_model(config, device)


def test_what_reading_responses_raises_is_raised(monkeypatch: pytest.MonkeyPatch):
    task = build_task(SamplingConfig(task="arithmetic", rollout_max_response_len=5), max_position_embeddings=32)
    monkeypatch.setattr(task.tokenizer, "decode_all", lambda ids: 1 / 0)
    (reader := ResponseReader(task)).read([0], task.prompts[:1], [np.zeros(1, np.int32)])
    with pytest.raises(ZeroDivisionError):
        reader.rewards([0])


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_concurrent_functions_score_while_others_are_sampled(is_concurrent: bool):
    called = threading.Event()

    def reward(prompt: dict, response: str, token_ids: list[int]) -> float:
        called.set()
        return float(len(token_ids))

    reward.is_concurrent = is_concurrent
    task = build_task(SamplingConfig(task="arithmetic", rollout_max_response_len=5), max_position_embeddings=32)
    reader = ResponseReader(replace(task, reward_function=reward))
    reader.read([7], task.prompts[:1], [np.zeros(1, np.int32)])
    assert called.wait(60 if is_concurrent else 0.2) == is_concurrent
    reader.read([5, 6], task.prompts[:2], [np.zeros(2, np.int32), np.zeros(3, np.int32)])
    assert reader.rewards([6, 5, 7]) == [3.0, 2.0, 1.0]


def test_source_and_evaluation():
    config = SamplingConfig(
        task="arithmetic", arithmetic_max_operand=9, rollout_batch_size=3, n_samples_per_prompt=4,
        rollout_max_response_len=5, temperature=1.5, eval_temperature=0.0,
    )  # fmt: skip
    task = build_task(config, max_position_embeddings=32)
    model = small_model(task.tokenizer.vocab_size)
    source = SamplingSource(build_engine(config, model), task, config, seed=11)
    batches = [source.next_batch(step) for step in range(4)]
    for step, batch in enumerate(batches):
        assert len(batch) == 12
        groups = [rollout.group_id for rollout in batch]
        assert groups == [group for group in dict.fromkeys(groups) for _ in range(4)]
        assert len(set(groups)) == 3
        for rollout in batch:
            response = rollout.token_ids[rollout.loss_mask]
            question = task.tokenizer.decode(rollout.token_ids[~rollout.loss_mask])
            assert rollout.group_id.endswith(":" + question)
            assert 1 <= len(response) <= 5
            assert (response[:-1] != task.tokenizer.eos_id).all()
            assert response[-1] == task.tokenizer.eos_id or len(response) == 5
            assert rollout.reward == float(task.tokenizer.decode(response) == str(eval(question[:-1])))
            assert (rollout.logprobs[rollout.loss_mask] < 0).all()
            assert rollout.policy_version == step
    # A source made anew, as after a restart, gives the same collections in any order.
    again = SamplingSource(build_engine(config, model), task, config, seed=11)
    for step in (3, 0, 2):
        for a, b in zip(again.next_batch(step), batches[step], strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert np.array_equal(a.logprobs, b.logprobs)
    other = SamplingSource(build_engine(config, model), task, config, seed=12).next_batch(0)
    assert [r.token_ids.tolist() for r in other] != [r.token_ids.tolist() for r in batches[0]]

    evaluation = SamplingEvaluation(build_engine(config, model), task, config, seed=11, max_prompts=7)
    metrics = evaluation.evaluate(5)
    assert metrics == evaluation.evaluate(6)
    assert 0 <= metrics["reward"] <= 1
    assert 1 <= metrics["response_tokens"] <= 5


def test_an_evaluation_draws_numbers_that_training_never_draws():
    """The same prompts, temperature and seed: training's random numbers would give the training rollouts."""
    config = SamplingConfig(
        task="arithmetic", arithmetic_max_operand=9, rollout_batch_size=1, n_samples_per_prompt=8,
        n_samples_per_eval_prompt=8, rollout_max_response_len=5,
    )  # fmt: skip
    task = build_task(config, max_position_embeddings=32)
    drawn: list[list[int]] = []
    recorded = replace(
        task,
        prompts=task.prompts[:1],
        eval_prompts=task.prompts[:1],
        reward_function=lambda prompt, response, ids: drawn.append(ids) or 0.0,
    )
    engine = build_engine(config, small_model(task.tokenizer.vocab_size))
    trained = [r.token_ids[r.loss_mask].tolist() for r in SamplingSource(engine, recorded, config, 11).next_batch(0)]
    assert drawn == trained
    drawn.clear()
    SamplingEvaluation(engine, recorded, config, seed=11).evaluate(0)
    assert len(drawn) == 8
    assert sum(a == b for a, b in zip(drawn, trained, strict=True)) < 4


@pytest.mark.parametrize(
    ("changes", "positions", "vocab_size", "message"),
    [
        (dict(rollout_max_response_len=2), 32, None, "--rollout-max-response-len 2 cuts right answers"),
        (dict(), 10, None, "--max-position-embeddings leaves 5"),
        (dict(), 32, 9, "--vocab-size 9: --task arithmetic has 16 tokens"),
    ],
)
def test_settings_that_do_not_fit_the_task(changes: dict, positions: int, vocab_size: int | None, message: str):
    config = SamplingConfig(**{"task": "arithmetic", "rollout_max_response_len": 5, **changes})
    with pytest.raises(InputError, match=message):
        build_task(config, positions, vocab_size)


FORMS = """
def ours(prompt, response, response_token_ids):
    return {"reward": len(response), "digits": response.isdigit(), "pred": response, "odd": float("nan")}

def batched(prompts, responses, response_token_ids):
    assert [len(ids) for ids in response_token_ids] == [len(response) for response in responses]
    prompts[0]["answer"] = "changed"
    return [{"score": len(response), "digits": response.isdigit()} for response in responses]

def verl(solution_str, data_source, ground_truth, extra_info=None):
    assert (data_source, ground_truth, extra_info) == ("s", "7", {"index": 3})
    return {"score": len(solution_str), "digits": solution_str.isdigit()}

def verl_batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert set(data_sources) == {"s"} and set(ground_truths) == {"7"} and extra_infos[0] == {"index": 3} and not kwargs
    return [{"score": len(text), "digits": text.isdigit()} for text in solution_strs]

def too_few(prompts, responses, response_token_ids):
    return [1.0] * (len(responses) - 1)

def one_is_bad(prompts, responses, response_token_ids):
    return [float("nan") if response == "x" else 1.0 for response in responses]

def raises(prompts, responses, response_token_ids):
    raise KeyError("x")

def two(prompt, response, response_token_ids):
    return {"score": 1, "reward": 2}

async def later(prompt, response, response_token_ids):
    return 1.0
"""
RECORD = {"data_source": "s", "answer": "7", "extra_info": {"index": 3}}


def responses_of(*texts: str) -> list[Response]:
    return [Response(f"p{i}", RECORD, text, [1] * len(text)) for i, text in enumerate(texts)]


@pytest.fixture
def forms(tmp_path: Path) -> Path:
    file = tmp_path / "forms.py"
    file.write_text(FORMS)
    return file


@pytest.mark.parametrize("name", ["ours", "batched", "verl", "verl_batched"])
def test_forms_of_reward_functions(forms: Path, name: str):
    """The names of the parameters decide what a function gets; components are means over all ranks."""
    function = load_reward_function(f"{forms}:{name}")
    scorer = Scorer(function, workers=3)
    before = scorer.tally
    assert scorer.score(responses_of("12", "abc", "", "7")) == [2.0, 3.0, 0.0, 1.0]
    assert scorer.score([]) == []
    assert counted(before, scorer.tally, lambda rank_values: [rank_values]) == {"reward/digits": 0.5}
    other_rank = ({}, {"reward/": (1.0, 1), "digits": (4.0, 4)})
    totals = counted(before, scorer.tally, lambda rank_values: [rank_values, other_rank])
    assert totals == {"reward/digits": 6 / 8, "reward/reward/": 1.0}
    between = scorer.tally
    scorer.score(responses_of("x"))
    assert counted(between, scorer.tally, lambda rank_values: [rank_values]) == {"reward/digits": 0.0}
    assert compute_reward(function, "p", RECORD, "12", [1, 1]) == 2.0
    assert RECORD["answer"] == "7"


def test_forms_that_fail(forms: Path):
    def scorer(name: str, drop: bool = False) -> Scorer:
        return Scorer(load_reward_function(f"{forms}:{name}"), drop)

    for name, message in (
        ("too_few", r"reward function, 2 responses: must return a list of as many values, got 1 values"),
        ("raises", r"reward function, 2 responses: raised KeyError: 'x' \(forms.py, line"),
        ("one_is_bad", r"prompt 'p1', response 'x': must return a finite number, got nan"),
        (
            "two",
            r"prompt 'p0', response 'y': the dictionary must have the reward as 'reward' or 'score', got 'score', ",
        ),
    ):
        with pytest.raises(InputError, match=message):
            scorer(name).score(responses_of("y", "x"))
    dropping = scorer("one_is_bad", drop=True)
    assert dropping.score(responses_of("y", "x", "z")) == [1.0, None, 1.0]
    assert dropping.counts == {"reward_failures": 1}
    assert scorer("raises", drop=True).score(responses_of("y", "x")) == [None, None]
    with pytest.raises(InputError, match="later is asynchronous"):
        scorer("later")
    with pytest.raises(InputError, match="no field 'answer'"):
        scorer("verl").score([Response("p", {}, "x", [])])
    slow = Scorer(lambda prompts, responses, ids: time.sleep(5) or [1.0], seconds=0.1)
    with pytest.raises(InputError, match=r"1 responses: took longer than 0.1 s"):
        slow.score(responses_of("x"))
