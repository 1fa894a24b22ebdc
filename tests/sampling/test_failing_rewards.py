"""Rewards that can fail (programs, servers, functions that raise) are never silently 0."""

import json
import re
import time
from pathlib import Path

import pytest

from conftest import seed_all
from megatron_dta.common import slow_calls
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.rewards import server_reward
from megatron_dta.sampling.rewards.scoring import Response, Scorer
from megatron_dta.sampling.rewards.server_reward import RemoteReward
from megatron_dta.sampling.sources.batch_source import RolloutError
from one_reward import compute_reward
from reward_server import RewardServer
from trainer_cases import make_trainer, rows_of, run


def remote(server: RewardServer, **settings: float) -> RemoteReward:
    return RemoteReward([server.url], **{"timeout_s": 0.5, "attempts": 3, **settings})


def test_a_server_is_asked() -> None:
    with RewardServer(lambda body: {"reward": len(body["response"]) / 2}) as server:
        function = remote(server)
        assert compute_reward(function, "p", {"answer": "ä"}, "abc", [1, 2]) == 1.5
        assert server.bodies == [{"prompt": {"answer": "ä"}, "response": "abc", "response_token_ids": [1, 2]}]
        assert function.counts == {"reward_retries": 0, "reward_timeouts": 0}


# In the body, in heads of interim replies.
DRIPS = ("drip", "continue")
LONG = b" " * (2 << 20)


@pytest.mark.parametrize("trouble", [("status", 500), "hang", "drop", LONG, *DRIPS])
def test_trouble_is_tried_again(trouble: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_reward, "FIRST_PAUSE_S", 0.02)
    slow = trouble in ("hang", *DRIPS)
    # On a busy machine half a second is too short for the others.
    patience = {} if slow else {"timeout_s": 20.0}
    with RewardServer(trouble, trouble, {"reward": 0.25}) as server:
        function = remote(server, **patience)
        assert compute_reward(function, "p", {}, "x", []) == 0.25
        assert function.counts == {"reward_retries": 2, "reward_timeouts": 2 * slow}
    with RewardServer(trouble) as server:
        function = remote(server, attempts=2, timeout_s=0.1 if slow else 20.0)
        with pytest.raises(InputError, match="failed 2 times, the last time: ") as caught:
            compute_reward(function, "p7", {}, "x", [])
        assert "'p7'" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (("status", 404), "is refused with 404"),
        (b"nonsense\n<html>", "is not JSON"),
        ({"reward": True}, "must be like"),
        (b'{"reward": NaN}', "NaN, which is not a number in JSON"),
        (b'{"reward": -1%s}' % (b"0" * 400), "must be finite"),
    ],
)
def test_a_wrong_reply_is_told_at_once(reply: object, message: str) -> None:
    with RewardServer(reply) as server:
        function = remote(server, timeout_s=5.0)
        with pytest.raises(InputError, match=message) as caught:
            compute_reward(function, "p", {}, "x", [])
        assert len(server.bodies) == 1
        assert "\n" not in str(caught.value)


def test_servers_take_turns_and_stand_in() -> None:
    with RewardServer({"reward": 1}) as good:
        with RewardServer({"reward": 2}) as closed:
            pass
        function = RemoteReward([closed.url, good.url], 1.0, 2)
        assert [function({}, "x", []) for _ in range(4)] == [1.0] * 4
        assert function.counts["reward_retries"] == 2
    for url in ("", "ftp://x", "http://", "http://h:0/", "http://h:99999/"):
        with pytest.raises(InputError, match="--reward-server-url"):
            RemoteReward([url])


def test_failures_stop_or_drop(caplog: pytest.LogCaptureFixture) -> None:
    def function(record: dict, response: str, ids: list[int]) -> float:
        if response == "bad":
            raise ValueError("no\nreward")
        return float(response)

    responses = [Response("p", {}, text, []) for text in ("1", "bad", "3")]
    with pytest.raises(InputError, match="raised ValueError: no reward"):
        Scorer(function).score(responses)
    scorer = Scorer(function, drop=True, workers=3)
    assert scorer.score(responses) == [1.0, None, 3.0]
    assert scorer.counts == {"reward_failures": 1}
    assert "'bad'" in scorer.last_failure
    assert caplog.messages == [f"a reward failed (--rollout-failure drop): {scorer.last_failure}"]
    assert Scorer(function).counts == {}


PROMPTS = (
    "--tokenizer-type CharacterTokenizer --rollout-batch-size 4 --n-samples-per-prompt 3 --rollout-max-response-len 3"
)


def prompts(folder: Path) -> str:
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) for i in range(9)]
    (folder / "p.jsonl").write_text("\n".join(lines))
    return f"--prompt-data {folder}/p.jsonl {PROMPTS}"


def test_a_run_drops_what_failed_and_counts_it(tmp_path: Path) -> None:
    seed_all(1)

    def judge(body: dict) -> object:
        return ("status", 404) if body["response_token_ids"][0] % 3 == 0 else {"reward": len(body["response"])}

    with RewardServer(judge) as server:
        flags = f"{prompts(tmp_path)} --reward-function remote --reward-server-url {server.url} --train-iters 3"
        with pytest.raises(InputError, match=r"reward function, prompt .* is refused with 404"):
            run(f"{flags} --save {tmp_path}/stopped")
        server.bodies.clear()
        run(f"{flags} --save {tmp_path}/run --rollout-failure drop")
        failed = sum(isinstance(judge(body), tuple) for body in server.bodies)
        rows = rows_of(tmp_path / "run" / "metrics.jsonl")
        assert sum(row["reward_failures"] for row in rows) == failed > 0
        assert [row["rollouts"] + row["reward_failures"] for row in rows] == [12.0] * 3
        assert all(row["reward_retries"] == 0 for row in rows)
        assert sum(row["failed_decoded_tokens"] for row in rows) >= failed
    with RewardServer(("status", 404)) as server:
        flags = f"{prompts(tmp_path)} --reward-function remote --reward-server-url {server.url} --rollout-failure drop"
        trainer, _ = make_trainer(flags)
        with pytest.raises(RolloutError, match=r"every reward of a rollout batch has failed; the last one: .* 404"):
            trainer.source.next_batch(0)


def test_groups_that_fail_as_a_whole_leave_a_step_out(tmp_path: Path) -> None:
    """If a group fails, a rollout batch with one step per group has one step fewer, and the run continues."""
    (tmp_path / "gone.py").write_text(
        "def reward(prompt, response, ids):\n"
        "    if prompt['answer'] == 'a':\n        raise ConnectionError\n    return len(ids) % 2\n"
    )
    rows = [json.dumps({"prompt": f"{i}=", "answer": "abcd"[i]}) for i in range(4)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    run(
        f"--prompt-data {tmp_path}/p.jsonl --tokenizer-type CharacterTokenizer --rollout-batch-size 4 "
        f"--reward-function {tmp_path}/gone.py:reward --rollout-failure drop --n-samples-per-prompt 3 "
        f"--num-steps-per-rollout 4 --rollout-max-response-len 4 --train-iters 7 --save {tmp_path}/run"
    )
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["rollout_batch_step"] for row in rows] == [0, 1, 2, 0, 1, 2, 0]
    assert all(row["reward_failures"] == 3 for row in rows)


@pytest.mark.parametrize("drop", [False, True])
def test_functions_that_hang_fail_in_time_where_there_is_one(drop: bool) -> None:
    def reward(prompt: dict, response: str, ids: list[int]) -> float:
        if response == "hang":
            time.sleep(20)
        if response == "raise":
            raise KeyError
        return float(len(response))

    scorer, began = Scorer(reward, drop, seconds=0.5), time.monotonic()
    responses = [Response("p", {}, text, []) for text in ("a", "hang", "bcd", "raise", "hang")]
    if drop:
        assert scorer.score(responses) == [1, None, 3, None, None]
        assert scorer.counts == {"reward_failures": 3, "reward_timeouts": 2}
        assert "took longer than 0.5 s" in scorer.last_failure
    else:
        with pytest.raises(InputError, match=r"prompt 'p', response 'hang': took longer than 0.5 s"):
            scorer.score(responses)
    assert time.monotonic() - began < 18


@pytest.mark.parametrize("workers", [1, 2])
def test_functions_that_take_long_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    monkeypatch.setattr(slow_calls, "FIRST_SECONDS", 0.1)
    calls: dict[int, slow_calls._Call] = {}

    def judge(prompt: dict, response: str, ids: list[int]) -> float:
        end = time.monotonic() + 20
        calls.update(slow_calls._running)
        while response == "slow" and len(caplog.messages) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        return 1.0

    judge.is_concurrent = True
    scorer = Scorer(judge, workers=workers)
    assert scorer.score([Response("p", {}, text, []) for text in ("quick", "slow", "quick")]) == [1, 1, 1]
    line = r"reward function, prompt 'p', response 'slow': \S*judge has been running for (\d+) s; "
    matches = [re.fullmatch(f"{line}--reward-timeout limits its time", text) for text in caplog.messages]
    assert [bool(match) for match in matches] == [True, True]
    assert not slow_calls._running
    assert all(call.what() for call in calls.values())  # the log may ask when it has ended
