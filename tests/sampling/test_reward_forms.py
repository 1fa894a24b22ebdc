"""Forms of reward functions: one response or lists, as verl calls them, numbers or dictionaries with components."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.rewards.registry import Response, load_reward_function
from megatron_dta.sampling.rewards.scoring import Scorer, counted
from one_reward import compute_reward

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
